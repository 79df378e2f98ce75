//! What the contract between nodes, operators and servers has, as its descriptors say. A test compares its table with it.

use std::collections::BTreeSet;
use std::path::Path;

use protox::prost_reflect::{DescriptorPool, Kind};

/// Returns the descriptors of cluster.proto.
fn pool() -> DescriptorPool {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../proto");
    let mut compiler = protox::Compiler::new([directory]).unwrap();
    compiler.open_file("cluster/v1/cluster.proto").unwrap();
    compiler.descriptor_pool()
}

/// Returns all calls: the methods of all services. Of a method whose question is one of several there is one call for each.
pub fn calls() -> BTreeSet<String> {
    let pool = pool();
    let mut calls = BTreeSet::new();
    for method in pool.services().flat_map(|service| service.methods().collect::<Vec<_>>()) {
        // What is said in a session is no call.
        let asked = method.input();
        let questions = asked.oneofs().filter(|_| !method.is_client_streaming());
        let questions: Vec<_> = questions.flat_map(|of| of.fields().collect::<Vec<_>>()).collect();
        let steps = asked.fields().filter_map(|field| match field.kind() {
            Kind::Enum(of) => Some(of.values().filter(|value| value.number() != 0).collect::<Vec<_>>()),
            _ => None,
        });
        let mut words: Vec<String> = questions.iter().map(|field| field.name().to_owned()).collect();
        words.extend(steps.flatten().map(|value| value.name().to_owned()));
        match words.is_empty() {
            true => drop(calls.insert(method.name().to_owned())),
            false => calls.extend(words.iter().map(|word| format!("{}.{word}", method.name()))),
        }
    }
    calls
}

//! What the contract between nodes, operators and servers has, as its descriptors say. A test compares its table with it.

use std::collections::BTreeSet;
use std::path::Path;

use protox::prost_reflect::{DescriptorPool, Kind, MessageDescriptor};

const PACKAGE: &str = "csid.cluster.v1";

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

/// Returns MESSAGE.FIELD of all messages that can be in what a node asks: the questions of the service that nodes call.
pub fn said_by_nodes() -> BTreeSet<String> {
    let service = pool().get_service_by_name(&format!("{PACKAGE}.Cluster")).expect("the service");
    let mut waiting: Vec<MessageDescriptor> = service.methods().map(|method| method.input()).collect();
    let mut seen = BTreeSet::new();
    let mut fields = BTreeSet::new();
    while let Some(of) = waiting.pop() {
        if !seen.insert(of.full_name().to_owned()) {
            continue;
        }
        for field in of.fields() {
            fields.insert(format!("{}.{}", of.name(), field.name()));
            match field.kind() {
                Kind::Message(inner) if !inner.is_map_entry() => waiting.push(inner),
                _ => {}
            }
        }
    }
    fields
}

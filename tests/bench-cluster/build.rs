//! Compiles etcd.proto without protoc. The floor has no code of csid's.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=../../etcd/proto/etcd.proto");
    let files = protox::compile(["etcd.proto"], ["../../etcd/proto"])?;
    tonic_prost_build::configure().build_server(false).compile_fds(files)?;
    Ok(())
}

//! The calls are made in C, by the program that also makes them at random.

fn main() {
    let (program, header) = ("../tests/c/fuzz.c", "../../include");
    for path in [program, "../tests/c/test.h", header] {
        println!("cargo:rerun-if-changed={path}");
    }
    cc::Build::new().file(program).include(header).std("c99").compile("entries");
}

//! include/csi.h is what the sources say, and C and C++ take it.

use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn header() -> PathBuf {
    root().join("include/csi.h")
}

#[test]
fn the_header_is_what_the_sources_say() {
    let ffi = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = cbindgen::Config::from_file(ffi.join("cbindgen.toml")).unwrap();
    let mut made = Vec::new();
    cbindgen::Builder::new().with_config(config).with_crate(ffi).generate().unwrap().write(&mut made);
    let made = String::from_utf8(made).unwrap();
    if std::env::var_os("RENEW").is_some() {
        std::fs::write(header(), &made).unwrap();
    }
    let kept = std::fs::read_to_string(header()).unwrap_or_default();
    let other = made.lines().zip(kept.lines()).find(|(made, kept)| made != kept);
    assert!(
        made == kept,
        "include/csi.h is not what the sources say, first at {other:?}; \
         `RENEW=1 cargo test -p libcsi-ffi --test header` makes it anew"
    );
}

/// Every entry is in the header, for cbindgen leaves out what it does not understand.
#[test]
fn the_header_has_every_entry() {
    let header = std::fs::read_to_string(header()).unwrap();
    let mut entries = 0;
    for file in std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("src")).unwrap() {
        let text = std::fs::read_to_string(file.unwrap().path()).unwrap();
        for entry in text.split("#[unsafe(no_mangle)]").skip(1) {
            let name = entry.split("fn ").nth(1).and_then(|rest| rest.split('(').next()).unwrap();
            assert!(header.contains(&format!("{name}(")), "{name} is not in csi.h");
            entries += 1;
        }
    }
    assert!(entries > 50, "only {entries} entries were found");
}

#[test]
fn the_manual_names_every_entry_and_code() {
    let header = std::fs::read_to_string(header()).unwrap();
    let manual = std::fs::read_to_string(root().join("packaging/man/libcsi.3")).unwrap();
    let said: Vec<&str> = words(&manual).collect();
    // What an opening bracket follows, and every code.
    let entries = header.split('(').filter_map(|before| words(before).next_back());
    let codes = words(&header).filter(|word| word.starts_with("CSI_E_"));
    for name in entries.filter(|word| word.starts_with("csi_")).chain(codes) {
        assert!(said.contains(&name), "libcsi(3) says nothing of {name}");
    }
}

fn words(text: &str) -> impl DoubleEndedIterator<Item = &str> {
    text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
}

#[test]
fn c_and_cpp_take_the_header() {
    let directory = tempfile::tempdir().unwrap();
    for (compiler, standard, name) in [("cc", "c99", "a.c"), ("c++", "c++11", "a.cpp")] {
        let file = directory.path().join(name);
        let use_it = "#include <csi.h>\n#include <csi.h>\nint main(void) { csi_volume v = {sizeof v, \"n\", \"i\", NULL, NULL, \
                      {NULL, 0}, {NULL, 0}, NULL, {NULL, 0}}; return v.struct_size == 0 || csi_version() == 0; }\n";
        std::fs::write(&file, use_it).unwrap();
        let mut command = Command::new(compiler);
        command.args(["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only"]);
        command.arg(format!("-std={standard}")).arg("-I").arg(root().join("include")).arg(&file);
        let done = command.output().unwrap();
        assert!(done.status.success(), "{standard}: {}", String::from_utf8_lossy(&done.stderr));
    }
}

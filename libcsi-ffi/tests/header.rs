//! include/csi.h is what the sources say, and C and C++ take it.

use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn header() -> PathBuf {
    root().join("include/csi.h")
}

/// The first function of each object, and the heading above it.
const OBJECTS: [(&str, &str); 13] = [
    ("csi_version", "The library"),
    ("csi_claim", "Claims"),
    ("csi_client_open", "Clients"),
    ("csi_error_code", "Errors"),
    ("csi_events_open", "Events"),
    ("csi_get_capacity", "Plugins: capacity, external volumes and snapshots"),
    ("csi_list", "Lists, and csid itself"),
    ("csi_mount_volume", "Mounts"),
    ("csi_op_fd", "Operations"),
    ("csi_register_plugin", "Plugins: registration and properties"),
    ("csi_row_size", "Rows"),
    ("csi_register_volume", "Volumes: registration and creation"),
    ("csi_attach_volume", "Volumes: attachment, size, snapshots and state"),
];

/// Inserts the heading of each object above the doc comment of its first function.
fn with_headings(header: &str) -> String {
    let mut made = header.to_owned();
    for (first, heading) in OBJECTS {
        let function = made.find(&format!(" {first}(")).unwrap_or_else(|| panic!("csi.h has no {first}"));
        let comment = made[..function].rfind("/**").unwrap();
        made.insert_str(comment, &format!("/* ---- {heading} ---- */\n\n"));
    }
    made
}

/// The declarations of functions in a header, each with the text of the doc comment that ends right above it.
fn functions(header: &str) -> Vec<(String, String, String)> {
    let mut found = Vec::new();
    let mut lines = header.lines();
    let mut last = String::new();
    while let Some(line) = lines.next() {
        if line.starts_with("/**") {
            last = line.to_owned();
            while !last.ends_with("*/") {
                last += &format!("\n{}", lines.next().unwrap());
            }
        } else {
            let before = line.split('(').next().unwrap_or_default();
            if !line.starts_with([' ', '/', '#', '}']) && line.contains('(') && before.contains(" ") {
                let name = words(before).next_back().unwrap().to_owned();
                found.push((name, before.to_owned(), std::mem::take(&mut last)));
            }
            last.clear();
        }
    }
    found
}

/// The names of the parameters in a function's source.
fn parameters(name: &str) -> Vec<String> {
    for file in std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("src")).unwrap() {
        let text = std::fs::read_to_string(file.unwrap().path()).unwrap();
        if let Some((_, rest)) = text.split_once(&format!("extern \"C\" fn {name}(")) {
            let list = rest.split(')').next().unwrap();
            return list
                .split(',')
                .filter_map(|one| Some(one.split_once(':')?.0.trim().to_owned()))
                .collect();
        }
    }
    panic!("{name} is in no source");
}

fn undocumented(header: &str) -> Vec<String> {
    let mut wrong = Vec::new();
    for (name, declared, comment) in functions(header) {
        let mut says = |what: &str, needed: bool| {
            if needed && !comment.contains(what) {
                wrong.push(format!("{name}: no {what:?}"));
            }
        };
        says("/**", true);
        says("Threads: ", true);
        says("@return ", !declared.starts_with("void "));
        let parameters = parameters(&name);
        for parameter in &parameters {
            says(&format!("@param {parameter}  "), true);
        }
        says("CSI_E_", declared.starts_with("csi_code csi_") && !name.starts_with("csi_error_"));
        says(
            "Errors of the operation",
            parameters.iter().any(|name| name == "op")
                && declared.starts_with("csi_code")
                && name != "csi_op_wait",
        );
    }
    wrong
}

#[test]
fn every_function_documents_parameters_and_errors() {
    let header = std::fs::read_to_string(header()).unwrap();
    assert!(functions(&header).len() > 60, "only {} functions were found", functions(&header).len());
    assert_eq!(undocumented(&header), Vec::<String>::new());
}

#[test]
fn missing_documentation_is_found() {
    let header = std::fs::read_to_string(header()).unwrap();
    let bare = "\nint32_t csi_op_fd(const struct csi_op *op);\n";
    assert!(undocumented(bare).contains(&"csi_op_fd: no \"/**\"".to_owned()));
    let error = header.replacen("Errors of the operation", "", 1);
    assert_eq!(undocumented(&error).len(), 1);
    let parameter = header.replacen("@param consumer  ", "", 1);
    assert_eq!(undocumented(&parameter).len(), 1);
}

#[test]
fn every_struct_member_and_constant_is_documented() {
    let header = std::fs::read_to_string(header()).unwrap();
    let (mut depth, mut last, mut wrong, mut count) = (0, "", Vec::new(), 0);
    for line in header.lines().skip_while(|line| !line.starts_with("#define CSI_VERSION_MAJOR")).skip(1) {
        let documented = last.trim_end().ends_with("*/");
        let is_comment = line.trim_start().starts_with('*');
        let is_member = depth == 1 && line.ends_with(';') && !line.starts_with('}') && !is_comment;
        let is_constant = line.starts_with("#define CSI_");
        let is_type = line.starts_with("typedef");
        count += usize::from(is_member || is_constant || is_type);
        if (is_member || is_constant || is_type) && !documented {
            wrong.push(line);
        }
        depth += line.matches('{').count();
        depth -= line.matches('}').count().min(depth);
        if line.contains("extern \"C\"") {
            break;
        }
        last = line;
    }
    assert!(count > 100, "only {count} members, constants and types were found");
    assert_eq!(wrong, Vec::<&str>::new());
}

#[test]
fn header_matches_the_sources() {
    let ffi = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = cbindgen::Config::from_file(ffi.join("cbindgen.toml")).unwrap();
    let mut made = Vec::new();
    cbindgen::Builder::new().with_config(config).with_crate(ffi).generate().unwrap().write(&mut made);
    let made = with_headings(&String::from_utf8(made).unwrap());
    if std::env::var_os("RENEW").is_some() {
        std::fs::write(header(), &made).unwrap();
    }
    let kept = std::fs::read_to_string(header()).unwrap_or_default();
    let other = made.lines().zip(kept.lines()).find(|(made, kept)| made != kept);
    assert!(
        made == kept,
        "include/csi.h is not what the sources say, first at {other:?}; \
         `RENEW=1 cargo test -p libcsi-ffi --test header` renews it"
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

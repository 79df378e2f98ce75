//! Dependencies point one way (ARCHITECTURE.md): each room imports only the rooms it may know.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// (room, what it may import of csid besides itself)
const ROOMS: [(&str, &[&str]); 9] = [
    (
        "bus",
        &[
            "cluster",
            "config",
            "error",
            "names",
            "plugin",
            "quiet_stream",
            "secret",
            "store",
            "system_bus",
            "volume",
        ],
    ),
    ("cluster", &["backoff", "config", "error", "fault", "plugin", "random", "store", "volume"]),
    (
        "volume",
        &[
            "backoff",
            "busy_poll",
            "config",
            "error",
            "fault",
            "histogram",
            "host",
            "names",
            "plugin",
            "random",
            "secret",
            "store",
        ],
    ),
    (
        "plugin",
        &["backoff", "config", "error", "histogram", "host", "names", "quiet_stream", "secret", "store"],
    ),
    ("store", &["error", "histogram"]),
    ("host", &["config", "error", "store", "system_bus"]),
    ("busy_poll.rs", &[]),
    ("fault.rs", &[]),
    ("quiet_stream.rs", &[]),
];

/// (folder or file of `volume`, what it imports of `volume` besides itself). `control`, the engine of claims and controller calls,
/// imports neither `context` nor `executor` nor `mounts`: it is to run where nothing is mounted, so it defines no method of theirs
/// and names none of their types. It reaches this host through `seam::Site`; `mounts` reach it through `seam::Control`.
const OF_VOLUME: [(&str, &[&str]); 24] = [
    ("model", &[]),
    ("api", &["model"]),
    ("errors", &["api", "model"]),
    ("events", &["errors", "model"]),
    ("lifecycle", &["errors", "model"]),
    ("transitions", &["errors", "lifecycle"]),
    ("servers", &[]),
    ("operation", &["api", "errors", "model", "servers"]),
    ("tables", &[]),
    ("seam", &["api", "model", "operation"]),
    ("waits", &["errors", "operation", "seam"]),
    (
        "control",
        &[
            "api",
            "errors",
            "events",
            "lifecycle",
            "model",
            "operation",
            "seam",
            "servers",
            "transitions",
            "waits",
        ],
    ),
    ("context", &["control", "operation", "tables"]),
    ("probe", &["context", "model"]),
    ("submit", &["api", "context", "errors", "operation"]),
    ("executor", &["api", "context", "control", "errors", "model", "operation", "seam"]),
    ("actor", &["api", "context", "errors", "executor", "model", "operation"]),
    ("manager", &["actor", "api", "context", "control", "errors", "model", "operation", "probe", "servers"]),
    (
        "mounts",
        &[
            "api",
            "context",
            "errors",
            "events",
            "executor",
            "lifecycle",
            "manager",
            "model",
            "operation",
            "probe",
            "seam",
            "tables",
            "waits",
        ],
    ),
    (
        "reconcile",
        &[
            "api",
            "context",
            "errors",
            "events",
            "lifecycle",
            "manager",
            "model",
            "operation",
            "probe",
            "tables",
        ],
    ),
    ("plugins", &["api", "context", "errors", "lifecycle", "manager", "model", "operation", "tables"]),
    (
        "volumes",
        &[
            "api",
            "context",
            "control",
            "errors",
            "events",
            "lifecycle",
            "manager",
            "model",
            "operation",
            "servers",
            "transitions",
        ],
    ),
    ("rules", &["errors", "lifecycle", "model", "transitions"]),
    ("explain", &["api", "control", "errors", "events", "lifecycle", "manager", "operation", "servers"]),
];

/// (folder of `volume`, what it may import of csid besides `volume`).
const OF_CSID: [(&str, &[&str]); 2] = [
    ("model", &["store"]),
    ("control", &["backoff", "config", "error", "fault", "names", "plugin", "secret", "store"]),
];

/// Folders of the repository, with those below them, whose files make no circle. A file and the files of its folder are apart.
const WITHOUT_CIRCLES: [&str; 12] = [
    "csid/src/bus",
    "csid/src/cluster",
    "csictl/src",
    "client/src",
    "etcd/src",
    "server/src",
    "link/src",
    "csid/src/plugin",
    "csid/src/host",
    "csid/src/daemon",
    "csid/src/store",
    "csid/src/volume",
];

fn sources(directory: &Path, found: &mut Vec<PathBuf>) {
    if directory.is_file() {
        found.push(directory.to_owned());
        return;
    }
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// Returns the code of a source file, without its tests, comments and visibilities: these import nothing.
fn code(path: &Path) -> String {
    let text = std::fs::read_to_string(path).unwrap();
    let text = text.split("mod tests {").next().unwrap().replace("pub(in crate::", "pub(in ");
    text.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n")
}

fn is_of_tests(path: &Path) -> bool {
    path.iter().any(|part| part.to_string_lossy().contains("test"))
}

/// Returns the rooms of csid that the files of a folder import, each with the file. `src` has the rooms.
fn rooms_imported(src: &Path, folder: &str) -> BTreeSet<(String, PathBuf)> {
    let mut files = Vec::new();
    sources(&src.join(folder), &mut files);
    let mut found = BTreeSet::new();
    for file in files {
        let below = file.strip_prefix(src).unwrap().to_owned();
        // Tests may import more.
        if is_of_tests(&below) {
            continue;
        }
        for path in paths(&code(&file), "crate") {
            // A name that lib.rs itself defines begins with a capital.
            if path[1].starts_with(|c: char| c.is_ascii_lowercase()) {
                found.insert((path[1].clone(), below.clone()));
            }
        }
    }
    found
}

/// Returns the files that import one another in a circle: those that are left when files without imports are taken away.
fn circle(mut files: BTreeMap<String, BTreeSet<String>>) -> BTreeSet<String> {
    loop {
        let names: BTreeSet<String> = files.keys().cloned().collect();
        let before = files.len();
        files.retain(|name, imports| imports.iter().any(|import| import != name && names.contains(import)));
        if files.len() == before {
            return names;
        }
    }
}

/// A path of modules, from the folder's own on.
type Module = Vec<String>;

fn is_of_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

/// Returns the paths of a tree such as `a::{b, c::D}`, and the text after it.
fn tree(text: &str) -> (Vec<Module>, &str) {
    let text = text.trim_start();
    if let Some(mut rest) = text.strip_prefix('{') {
        let mut paths = Vec::new();
        loop {
            rest = rest.trim_start_matches(|c: char| c.is_whitespace() || c == ',');
            if rest.is_empty() || rest.starts_with('}') {
                return (paths, rest.strip_prefix('}').unwrap_or_default());
            }
            let (more, after) = tree(rest);
            // A name by which an import is known here, `as X`, or anything else that is no path.
            rest = after.trim_start_matches(|c: char| c != ',' && c != '}');
            paths.extend(more);
        }
    }
    let (word, rest) = text.split_at(text.find(|c| !is_of_word(c)).unwrap_or(text.len()));
    let below = rest.strip_prefix("::").filter(|rest| rest.starts_with(|c| is_of_word(c) || c == '{'));
    let (paths, rest) = below.map_or((vec![Vec::new()], rest), tree);
    let whole = paths.into_iter().map(|path| [vec![word.to_owned()], path].concat());
    (whole.collect(), rest)
}

/// Returns the paths in a text that begin with this word.
fn paths(text: &str, word: &str) -> Vec<Module> {
    let mut found = Vec::new();
    for (place, _) in text.match_indices(&format!("{word}::")) {
        if !text[..place].ends_with(|c| is_of_word(c) || c == ':') {
            found.extend(tree(&text[place..]).0);
        }
    }
    found
}

/// Returns the modules of a folder and what each imports of them. `own`: the folder's own path in the crate.
fn modules_of(root: &Path, own: &[&str]) -> BTreeMap<String, BTreeSet<String>> {
    let mut found = Vec::new();
    sources(root, &mut found);
    let mut texts: BTreeMap<Module, String> = BTreeMap::new();
    for path in found {
        let mut module: Module = path
            .strip_prefix(root)
            .unwrap()
            .with_extension("")
            .iter()
            .map(|part| part.to_string_lossy().into_owned())
            .collect();
        if is_of_tests(path.strip_prefix(root).unwrap()) {
            continue;
        }
        if ["mod", "lib", "main"].contains(&module.last().unwrap().as_str()) {
            module.pop();
        }
        let code = code(&path);
        // A name for the folder itself would hide what is imported by it.
        let alias = own.last().map(|own| [format!("::{own};"), format!("::{own} as ")]);
        assert!(alias.is_none_or(|all| !all.iter().any(|alias| code.contains(alias))), "{module:?}");
        texts.insert(module, code);
    }
    let name = |module: &[String]| module.join("::");
    let imports = texts.iter().map(|(module, text)| {
        let mut imports: Vec<Module> = Vec::new();
        for path in paths(text, "crate") {
            if let Some(path) = path[1..]
                .strip_prefix(own.iter().map(|part| (*part).to_owned()).collect::<Vec<_>>().as_slice())
            {
                imports.push(path.to_vec());
            }
        }
        for path in paths(text, "super") {
            let up = path.iter().take_while(|part| *part == "super").count();
            if up <= module.len() {
                imports.push([&module[..module.len() - up], &path[up..]].concat());
            }
        }
        for child in texts.keys().filter(|child| child.len() == module.len() + 1 && child.starts_with(module))
        {
            if !paths(text, child.last().unwrap()).is_empty() {
                imports.push(child.clone());
            }
        }
        // An import leads to the last of its words that is a module.
        let files = imports.iter().filter_map(|path| {
            (0..=path.len()).rev().map(|end| &path[..end]).find(|path| texts.contains_key(*path))
        });
        (name(module), files.filter(|file| *file != module.as_slice()).map(name).collect())
    });
    imports.collect()
}

#[test]
fn files_of_a_folder_have_no_circle() {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    for folder in WITHOUT_CIRCLES {
        let (_, own) = folder.split_once("/src").unwrap();
        let own: Vec<&str> = own.split('/').filter(|part| !part.is_empty()).collect();
        let modules = modules_of(&repository.join(folder), &own);
        assert!(modules.len() > 4, "{folder}: {:?}", modules.keys());
        let arrows: usize = modules.values().map(BTreeSet::len).sum();
        assert!(arrows >= modules.len(), "{folder}: only {arrows} imports were read");
        let found = circle(modules.clone());
        let between: Vec<_> = modules.into_iter().filter(|(name, _)| found.contains(name)).collect();
        assert!(between.is_empty(), "{folder}: files that import one another: {between:#?}");
    }
}

#[test]
fn imports_are_read_as_paths() {
    let text =
        "use crate::bus::{a, b::{C, d::E}};\nsuper::super::x::y::<T>(); not_crate::z; use crate::w as v;";
    let found: Vec<String> = paths(text, "crate").iter().map(|path| path.join("::")).collect();
    assert_eq!(found, ["crate::bus::a", "crate::bus::b::C", "crate::bus::b::d::E", "crate::w"]);
    assert_eq!(paths(text, "super"), [["super", "super", "x", "y"].map(str::to_owned)]);
}

#[test]
fn folders_of_volume_import_what_their_rows_say() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let files = modules_of(&src.join("volume"), &["volume"]);
    assert!(files.len() > 50, "{:?}", files.keys());
    let folder = |name: &str| name.split("::").next().unwrap().to_owned();
    // What mod.rs itself has is for the other rooms, which have no row.
    let mut found: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (name, imports) in files.iter().filter(|(name, _)| !name.is_empty()) {
        let others = imports.iter().map(|import| folder(import)).filter(|import| *import != folder(name));
        found.entry(folder(name)).or_default().extend(others);
    }
    let rows: BTreeMap<String, BTreeSet<String>> = OF_VOLUME
        .iter()
        .map(|(of, allowed)| (of.to_string(), allowed.iter().map(|import| import.to_string()).collect()))
        .collect();
    assert_eq!(found, rows, "what the folders of volume import, and what their rows say");
    assert_eq!(circle(rows), BTreeSet::new(), "folders of volume that import one another");
    // The engine knows of the pure rules only those of claims, and of operations neither the journal nor the queues.
    const OF_ENGINE: [&str; 7] = [
        "model::claim",
        "model::paths",
        "model::subject",
        "operation::orders",
        "operation::request",
        "operation::running",
        "operation::table",
    ];
    let engine = files.iter().filter(|(name, _)| folder(name) == "control");
    let is_split = |import: &&String| ["model", "operation"].contains(&folder(import).as_str());
    for import in engine.flat_map(|(_, imports)| imports).filter(is_split) {
        assert!(OF_ENGINE.contains(&import.as_str()), "control imports {import}");
    }
    for (of, allowed) in OF_CSID {
        let found = rooms_imported(&src, &format!("volume/{of}"));
        let found: BTreeSet<&str> =
            found.iter().map(|(room, _)| room.as_str()).filter(|room| *room != "volume").collect();
        assert_eq!(found, allowed.iter().copied().collect(), "what {of} imports of csid");
    }
}

#[test]
fn circle_of_files_is_found() {
    let files = |all: &[(&str, &[&str])]| {
        all.iter()
            .map(|(name, imports)| (name.to_string(), imports.iter().map(|i| i.to_string()).collect()))
            .collect()
    };
    assert_eq!(circle(files(&[("a", &["b"]), ("b", &["c"]), ("c", &[])])), BTreeSet::new());
    let found = circle(files(&[("a", &["b"]), ("b", &["c"]), ("c", &["b"]), ("d", &[])]));
    assert!(found.contains("b") && found.contains("c") && !found.contains("d"), "{found:?}");
}

#[test]
fn dependencies_point_one_way() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    for (room, allowed) in ROOMS {
        let mut found = rooms_imported(&src, room);
        assert!(allowed.is_empty() || !found.is_empty(), "no import of {room} was read");
        found.retain(|(import, _)| import != room && !allowed.contains(&import.as_str()));
        assert!(found.is_empty(), "{room} imports {found:#?}");
    }
}

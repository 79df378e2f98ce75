//! The contract's comments: each member has one, and it names what csid's code decodes and asks for. The code is read as text.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use csi_proto::DBUS_INTERFACE_XML as XML;

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

fn source(path: &str) -> String {
    std::fs::read_to_string(repository().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// A method, signal or property.
struct Member {
    interface: String,
    name: String,
    kind: String,
    /// Name, type and direction; a signal's has no direction.
    arguments: Vec<[String; 3]>,
    comment: Vec<String>,
}

impl Member {
    fn title(&self) -> String {
        format!("{}.{}", self.interface, self.name)
    }

    fn line(&self, begin: &str) -> Option<&str> {
        self.comment.iter().find_map(|line| line.trim_start().strip_prefix(begin))
    }
}

fn comment(text: &str) -> Vec<String> {
    text.trim_matches('\n').lines().map(str::to_owned).collect()
}

/// The contract's members in order, and the comment in front of everything.
fn contract() -> (Vec<String>, Vec<Member>) {
    let (mut preamble, mut members, mut interface) = (None, Vec::<Member>::new(), String::new());
    let (mut rest, mut before) = (XML, Vec::new());
    while let Some(start) = rest.find('<') {
        rest = &rest[start..];
        if let Some(text) = rest.strip_prefix("<!--") {
            let (text, after) = text.split_once("-->").expect("a comment ends");
            before = comment(text);
            preamble.get_or_insert_with(|| before.clone());
            rest = after;
            continue;
        }
        let end = rest.find('>').expect("a tag ends");
        let tag = &rest[1..end];
        rest = &rest[end..];
        let attribute = |name: &str| {
            let text = tag.split_once(&format!(" {name}=\"")).and_then(|(_, text)| text.split_once('"'));
            text.map_or(String::new(), |(value, _)| value.to_owned())
        };
        let kind = tag.split([' ', '/']).next().unwrap_or_default();
        match kind {
            "interface" => interface = attribute("name"),
            "method" | "signal" | "property" => members.push(Member {
                interface: interface.clone(),
                name: attribute("name"),
                kind: kind.to_owned(),
                arguments: Vec::new(),
                comment: std::mem::take(&mut before),
            }),
            "arg" => {
                let argument = ["name", "type", "direction"].map(attribute);
                members.last_mut().expect("an argument has a member").arguments.push(argument);
            }
            _ => {}
        }
        // Only what stands directly before a member describes it.
        before.clear();
    }
    (preamble.expect("the contract begins with a comment"), members)
}

/// The key and its type of a line `KEY (TYPE, …): …` or `KEY (TYPE): …`.
fn key(line: &str) -> Option<(String, String)> {
    let (key, rest) = line.split_once(" (")?;
    let name = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    // A structure in the type has parentheses of its own.
    let mut open = 0;
    let end = rest.find(|c| {
        open += i32::from(c == '(') - i32::from(c == ')');
        c == ',' || open < 0
    })?;
    let of_type = &rest[..end];
    let is_type = !of_type.is_empty() && of_type.chars().all(|c| "abdghinoqstuvxy{}()".contains(c));
    (!key.is_empty() && key.chars().all(name) && is_type).then(|| (key.to_owned(), of_type.to_owned()))
}

fn depth(line: &str) -> usize {
    line.len() - line.trim_start().len()
}

/// The lines below the one that begins so, to the next one of its depth, or an empty one.
fn block<'c>(lines: &'c [String], title: &str) -> Vec<&'c str> {
    let from = lines.iter().position(|line| line.trim_start().starts_with(title));
    let Some(from) = from else { return Vec::new() };
    let of_title = depth(&lines[from]);
    let below = lines[from + 1..].iter().take_while(|line| depth(line) > of_title);
    below.map(String::as_str).collect()
}

type Keys = BTreeMap<String, String>;

/// The keys that a block describes: its items, and not what an item goes on with.
fn described(block: &[&str]) -> Keys {
    let least = block.iter().map(|line| depth(line)).min().unwrap_or(0);
    let items = block.iter().filter(|line| depth(line) == least);
    items.filter_map(|line| key(line.trim_start())).collect()
}

/// The string pairs of a text: what an options table holds.
fn pairs(text: &str) -> Keys {
    let quoted = |part: &str| part.trim().strip_prefix('"')?.strip_suffix('"').map(str::to_owned);
    let tuples = text.split('(').filter_map(|part| part.split_once(')').map(|(tuple, _)| tuple));
    let two = tuples.filter_map(|tuple| tuple.split_once(','));
    two.filter_map(|(key, of_type)| Some((quoted(key)?, quoted(of_type)?))).collect()
}

/// The table of a constant, in the text of its file.
fn table(text: &str, name: &str) -> Option<Keys> {
    let start = text.find(&format!("const {name}: Keys"))?;
    let end = text[start..].find("];")?;
    Some(pairs(&text[start..start + end]))
}

/// The options that a handler decodes: one map for each of its `a{sv}` arguments; whether it takes the inline and the common ones.
struct Decoded {
    keys: Keys,
    inline: bool,
    common: bool,
}

fn constants(argument: &str) -> BTreeSet<&str> {
    let words = argument.split(|c: char| !c.is_ascii_uppercase() && c != '_');
    words.filter(|word| word.len() > 1).collect()
}

fn decoded(module: &str, handler: &str) -> Vec<Decoded> {
    let file = source(&format!("csid/src/bus/{module}.rs"));
    let start = file.find(&format!("async fn {handler}(")).unwrap_or_else(|| panic!("{module}::{handler}"));
    let body = &file[start..start + file[start..].find("\n}\n").expect("a function ends")];
    let mut found = Vec::new();
    for call in body.split("Options::check").skip(1) {
        let (how, rest) = call.split_once('(').unwrap();
        let arguments = &rest[..rest.find("?;").or_else(|| rest.find(";")).unwrap()];
        // Behind the first comma: before it is the map.
        let (_, known) = arguments.split_once(", ").unwrap();
        let mut decoded = Decoded { keys: pairs(known), inline: false, common: how != "_spec" };
        if known.trim_end_matches([')', '?']).trim() == "keys" {
            let (_, keys) = body.split_once("let keys = ").unwrap();
            decoded.keys.extend(pairs(keys.split("];").next().unwrap()));
        }
        // Strings out of the way: they are no constants.
        let names: String = known.split('"').step_by(2).collect::<Vec<_>>().join(" ");
        for name in constants(&names) {
            if name == "INLINE" {
                decoded.inline = true;
                continue;
            }
            let of_others = || {
                let mut files = ["manager", "cursor"].into_iter();
                files.find_map(|file| table(&source(&format!("csid/src/bus/{file}.rs")), name))
            };
            let keys = table(body, name).or_else(|| table(&file, name)).or_else(of_others);
            decoded.keys.extend(keys.unwrap_or_else(|| panic!("{module}::{handler}: no table {name}")));
        }
        found.push(decoded);
    }
    found
}

/// Of each served method the action and the handler, as the dispatcher's table has them.
fn served() -> BTreeMap<String, [String; 3]> {
    let dispatch = source("csid/src/bus/dispatch.rs");
    let lines = dispatch.lines().filter_map(|line| {
        let (member, rest) = line.trim().split_once('(')?;
        let member = match member.split_once('.')? {
            ("MANAGER", name) => format!("org.csid1.Manager.{name}"),
            ("CLUSTER", name) => format!("org.csid1.Cluster.{name}"),
            ("PLUGIN", name) => format!("org.csid1.Plugin.{name}"),
            _ => return None,
        };
        let (_, rest) = rest.split_once("): ")?;
        let (action, handler) = rest.trim_end_matches(';').split_once(" => ")?;
        let (module, handler) = handler.split_once("::")?;
        let mut kebab = String::new();
        for c in action.split(',').next()?.chars() {
            if c.is_ascii_uppercase() && !kebab.is_empty() {
                kebab.push('-');
            }
            kebab.push(c.to_ascii_lowercase());
        }
        Some((member, [kebab, module.to_owned(), handler.to_owned()]))
    });
    lines.collect()
}

/// The names below `org.csid1.Error`.
fn kinds() -> BTreeSet<String> {
    let error = source("csid/src/error.rs");
    let names = error.lines().filter_map(|line| line.trim().strip_prefix("Kind::")?.split_once(" => \""));
    names.map(|(kind, _)| kind.to_owned()).collect()
}

#[test]
fn every_member_has_a_whole_comment() {
    let (_, members) = contract();
    assert!(members.len() > 70, "{}", members.len());
    let (kinds, mut wrong) = (kinds(), Vec::new());
    for member in &members {
        let title = member.title();
        if member.comment.first().map(|line| line.trim()) != Some(&format!("{}:", member.name)) {
            wrong.push(format!("{title}: no comment before it that begins with `{}:`", member.name));
            continue;
        }
        let has_text = member.comment[1..].iter().any(|line| {
            let text = line.trim_start();
            depth(line) == depth(&member.comment[0]) && text.starts_with(char::is_alphabetic)
        });
        if !has_text {
            wrong.push(format!("{title}: no summary"));
        }
        let lines = member.comment.iter().filter_map(|line| line.trim_start().strip_prefix('@'));
        let named: Vec<&str> = lines.filter_map(|line| line.split_once(':')).map(|(name, _)| name).collect();
        let arguments: Vec<&str> = member.arguments.iter().map(|[name, ..]| name.as_str()).collect();
        if named != arguments {
            wrong.push(format!("{title}: the arguments are {arguments:?}, described are {named:?}"));
        }
        if member.kind == "property" {
            continue;
        }
        if member.line("Since: ").is_none() {
            wrong.push(format!("{title}: no line `Since:`"));
        }
        if member.kind == "signal" {
            continue;
        }
        let Some(errors) = member.line("Errors:") else {
            wrong.push(format!("{title}: no line `Errors:`"));
            continue;
        };
        let block = block(&member.comment, "Errors:");
        if errors.is_empty() && block.is_empty() {
            wrong.push(format!("{title}: `Errors:` names none"));
        }
        let least = block.iter().map(|line| depth(line)).min().unwrap_or(0);
        for line in block.iter().filter(|line| depth(line) == least) {
            let names = line.trim().split_once(": ").map_or("", |(names, _)| names).split(", ");
            for name in names.filter(|name| !kinds.contains(*name)) {
                wrong.push(format!("{title}: `{name}` is no error ({})", line.trim()));
            }
        }
    }
    for member in members.iter().filter(|member| member.kind == "method") {
        let served = served();
        let title = member.title();
        let Some([action, ..]) = served.get(&title) else {
            wrong.push(format!("{title}: not in the dispatcher's table"));
            continue;
        };
        let access = member.line("Access: org.csid1.").unwrap_or_default();
        let name = access.split(|c: char| !c.is_ascii_lowercase() && c != '-').next();
        if name != Some(action.as_str()) {
            wrong.push(format!("{title}: `Access:` does not begin with org.csid1.{action}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn described_options_are_the_decoded_ones() {
    let (_, members) = contract();
    let (served, mut wrong, mut options) = (served(), Vec::new(), 0);
    let inline = table(&source("csid/src/bus/arguments.rs"), "INLINE").unwrap();
    for member in members.iter().filter(|member| member.kind == "method") {
        let title = member.title();
        let Some([_, module, handler]) = served.get(&title) else { continue };
        let maps = member.arguments.iter().filter(|[_, of_type, way]| of_type == "a{sv}" && way == "in");
        let maps: Vec<&str> = maps.map(|[name, ..]| name.as_str()).collect();
        let decoded = decoded(module, handler);
        assert_eq!(maps.len(), decoded.len(), "{title}: maps, and tables in {module}::{handler}");
        for (map, decoded) in maps.iter().zip(decoded) {
            let block = block(&member.comment, &format!("@{map}:"));
            let described = described(&block);
            options += described.len();
            for (key, of_type) in &decoded.keys {
                match described.get(key) {
                    Some(said) if said == of_type => {}
                    said => wrong.push(format!("{title}: {map}: {key} is {of_type}, described is {said:?}")),
                }
            }
            let is_decoded =
                |key: &String| decoded.keys.contains_key(key) || (decoded.inline && inline.contains_key(key));
            for key in described.keys().filter(|key| !is_decoded(key)) {
                wrong.push(format!("{title}: {map}: {key} is described, and not decoded"));
            }
            let text = block.join(" ");
            for (words, taken) in
                [("the inline options", decoded.inline), ("the common options", decoded.common)]
            {
                if text.contains(words) != taken {
                    wrong.push(format!("{title}: {map}: `{words}`: taken: {taken}"));
                }
            }
        }
    }
    assert!(options > 120, "{options}");
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn shared_options_are_the_decoded_ones() {
    let (preamble, _) = contract();
    for (title, file, name) in [
        ("Common options", "options", "COMMON"),
        ("Inline options", "arguments", "INLINE"),
        ("Capabilities", "arguments", "CAPABILITY"),
    ] {
        let from = preamble.iter().position(|line| line == &format!("  {title}")).expect(title);
        let section = preamble[from + 1..].iter().take_while(|line| !line.is_empty());
        let described: Keys = section.filter_map(|line| key(line.trim_start())).collect();
        let decoded = table(&source(&format!("csid/src/bus/{file}.rs")), name).expect(name);
        assert_eq!(described, decoded, "{title}");
    }
}

#[test]
fn error_details_are_the_encoded_ones() {
    let (preamble, _) = contract();
    let from = preamble.iter().position(|line| line.trim_start().starts_with("Keys of the details")).unwrap();
    let section = preamble[from + 1..].iter().take_while(|line| !line.is_empty());
    let described: BTreeSet<String> =
        section.filter_map(|line| key(line.trim_start())).map(|(key, _)| key).collect();
    let failure = source("csid/src/bus/failure.rs");
    let (_, body) = failure.split_once("\nfn details(").unwrap();
    let body = &body[..body.find("\n}\n").unwrap()];
    let strings = body.split('"').skip(1).step_by(2).map(str::to_owned);
    assert_eq!(described, strings.collect());
}

#[test]
fn described_event_types_are_the_written_ones() {
    let (_, members) = contract();
    let event = members.iter().find(|member| member.title() == "org.csid1.Manager.Event").unwrap();
    let text = event.comment.iter().map(|line| line.trim()).collect::<Vec<_>>().join(" ");
    let (_, types) = text.split_once("The types are ").unwrap();
    let (types, _) = types.split_once(". ").unwrap();
    let described: Vec<&str> = types.split([',', ';']).map(str::trim).collect();
    let file = source("csid/src/store/event_kind.rs");
    let names = file.lines().filter_map(|line| line.trim().strip_prefix("EventKind::")?.split_once(" => \""));
    let written: Vec<&str> = names.filter_map(|(_, name)| name.strip_suffix("\",")).collect();
    assert_eq!(described, written);
}

#[test]
fn described_features_are_the_served_ones() {
    let (_, members) = contract();
    let property = members.iter().find(|member| member.title() == "org.csid1.Manager.Features").unwrap();
    let text = property.comment.iter().map(|line| line.trim()).collect::<Vec<_>>().join(" ");
    let (_, words) = text.split_once("one word for each: ").unwrap();
    let (words, _) = words.split_once(", and exec ").unwrap();
    let file = source("csid/src/bus/manager.rs");
    let (_, list) = file.split_once("const FEATURES: &[&str] = &[").unwrap();
    let served: Vec<&str> = list[..list.find("];").unwrap()].split('"').skip(1).step_by(2).collect();
    assert_eq!(words.split(", ").collect::<Vec<_>>(), served);
}

#[test]
fn described_row_keys_are_the_encoded_ones() {
    let (_, members) = contract();
    for (member, argument, module, function, from) in [
        ("Manager.GetVolume", "row", "volume_rows", "row", "Map::from"),
        ("Manager.CreateSnapshot", "snapshot", "inventory", "row", "Map::from"),
        ("Manager.Explain", "report", "volumes", "explain", "Map::from"),
        ("Manager.Claim", "claim", "claims", "claim", "answer.extend"),
        ("Manager.ListClaims", "claims", "claims", "row", "Map::from"),
        ("Manager.ListMounts", "mounts", "mounts", "row", "Map::from"),
        ("Manager.Reconcile", "report", "mounts", "reconcile", "Map::from"),
        ("Manager.ListOperations", "operations", "manager", "list_operations", "Map::from"),
        ("Plugin.Drain", "report", "upgrade", "drain", "Map::from"),
        ("Plugin.GetStats", "stats", "plugin", "get_stats", "Map::from"),
        ("Plugin.ListExternalVolumes", "volumes", "inventory", "external", "Map::from"),
    ] {
        let title = format!("org.csid1.{member}");
        let of_member = members.iter().find(|member| member.title() == title).expect(member);
        let described = described(&block(&of_member.comment, &format!("@{argument}:")));
        let file = source(&format!("csid/src/bus/{module}.rs"));
        let (_, body) = file.split_once(&format!("fn {function}(")).expect(function);
        let (_, body) = body[..body.find("\n}\n").unwrap()].split_once(from).expect(from);
        let tuples = body.split('(').skip(1).filter_map(|tuple| tuple.trim_start().strip_prefix('"'));
        let encoded = tuples.filter_map(|tuple| tuple.split('"').next());
        let encoded: BTreeSet<String> = encoded.filter(|key| !key.is_empty()).map(str::to_owned).collect();
        assert_eq!(described.into_keys().collect::<BTreeSet<_>>(), encoded, "{member}: {argument}");
    }
}

/// Returns the words of a list such as `a, b (why), or c`: the last word of each part.
fn listed(text: &str) -> Vec<String> {
    let plain: String =
        text.split('(').map(|part| part.split_once(')').map_or(part, |(_, rest)| rest)).collect();
    let parts = plain.split([',', ';', '.']).flat_map(|part| part.split(" or "));
    parts.filter_map(|part| part.split_whitespace().last()).map(str::to_owned).collect()
}

/// Returns the words that a member's comment lists in the item that begins so, behind its first colon.
fn words_of(member: &Member, begin: &str) -> Vec<String> {
    let from = member.comment.iter().position(|line| line.trim_start().starts_with(begin)).expect(begin);
    let goes_on = |line: &&String| !line.is_empty() && key(line.trim_start()).is_none();
    let (_, first) = member.comment[from].split_once(':').unwrap();
    let rest = member.comment[from + 1..].iter().take_while(goes_on).map(String::as_str);
    listed(&std::iter::once(first).chain(rest).collect::<Vec<_>>().join(" "))
}

/// A person who is left with a state or an error finds a row of it in docs/troubleshooting.md.
#[test]
fn every_state_and_error_has_a_way_out() {
    let (_, members) = contract();
    let words = |title: &str, begin: &str| {
        let title = format!("org.csid1.{title}");
        words_of(members.iter().find(|member| member.title() == title).expect(&title), begin)
    };
    let error = source("csid/src/error.rs");
    let (_, obstacles) = error.split_once("impl Obstacle {").unwrap();
    let obstacles = &obstacles[..obstacles.find("\n}\n").unwrap()];
    let obstacles = obstacles.split("=> \"").skip(1).filter_map(|rest| rest.split('"').next());
    let document = source("docs/troubleshooting.md");
    for (section, words, least) in [
        ("csid", words("Manager.State", "What csid does:"), 5),
        ("Mounts", words("Manager.ListMounts", "state (s): mounting"), 6),
        ("Claims", words("Manager.ListClaims", "state (s):"), 6),
        ("Volumes", words("Manager.GetVolume", "standing (s):"), 4),
        ("Plugins", words("Plugin.State", "State of the active instance:"), 7),
        ("Clusters", words("Cluster.State", "State in the cluster:"), 7),
        ("Errors", kinds().into_iter().collect(), 18),
        ("Obstacles", obstacles.map(str::to_owned).collect(), 29),
    ] {
        assert!(words.len() >= least, "{section}: {words:?}");
        let (_, text) = document.split_once(&format!("\n## {section}\n")).expect(section);
        let text = text.split("\n## ").next().unwrap();
        let rows =
            text.lines().filter_map(|line| line.strip_prefix("| ")?.strip_suffix(" |")?.split_once(" | "));
        let rows: Vec<(&str, &str)> = rows.collect();
        for word in words {
            let row = rows.iter().find(|(shown, _)| shown.contains(&format!("`{word}`")));
            let (_, rest) =
                row.unwrap_or_else(|| panic!("docs/troubleshooting.md, {section}: no row of `{word}`"));
            assert!(rest.split(" | ").nth(1).is_some_and(|ends| !ends.is_empty()), "`{word}` has no way out");
        }
    }
}

#[test]
fn contract_lines_have_at_most_120_characters() {
    let long: Vec<&str> = XML.lines().filter(|line| line.chars().count() > 120).collect();
    assert!(long.is_empty(), "{long:#?}");
}

#[test]
fn man_page_has_every_member_and_key() {
    let (_, members) = contract();
    let root = repository();
    let mut awk = Command::new("awk");
    awk.arg("-f")
        .args(["packaging/man/org.csid1.5.awk", "proto/dbus/org.csid1.xml"].map(|path| root.join(path)));
    let made = awk.output().expect("awk runs");
    assert!(made.status.success() && made.stderr.is_empty(), "{}", String::from_utf8_lossy(&made.stderr));
    let page = String::from_utf8(made.stdout).unwrap().replace("\\-", "-");
    let mut heads: Vec<&str> = page.lines().filter_map(|line| line.strip_prefix(".SS ")).collect();
    let names: Vec<&str> = members.iter().map(|member| member.name.as_str()).collect();
    heads.retain(|head| !head.is_empty());
    assert_eq!(heads, names);
    let nested = |what: &str| page.lines().filter(|line| *line == what).count();
    assert_eq!(nested(".RS"), nested(".RE"));
    for member in &members {
        let items = member.comment.iter().filter(|line| depth(line) == depth(&member.comment[0]) + 2);
        for (key, of_type) in items.filter_map(|line| key(line.trim_start())) {
            assert!(page.contains(&format!("\n\\fB{key} ({of_type}")), "{}: {key}", member.title());
        }
    }
    // A control line that is text would be lost.
    let macros = [".TH ", ".SH ", ".SS ", ".PP", ".TP", ".RS", ".RE", ".BR "];
    for line in page.lines().filter(|line| line.starts_with(['.', '\''])) {
        assert!(macros.iter().any(|known| line.starts_with(known)), "{line}");
    }
}

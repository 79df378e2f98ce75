//! `systemctl show`.

use std::{collections::BTreeMap, io};

use tokio::process::Command;

use super::bounded::run;

/// The properties of a unit, by their names. A property that the unit does not have is missing.
#[derive(Debug, Default)]
pub struct Unit(BTreeMap<String, String>);

impl Unit {
    /// Returns the property's value. Empty: it has none.
    pub fn get(&self, property: &str) -> &str {
        self.0.get(property).map_or("", String::as_str)
    }

    pub fn has(&self, property: &str) -> bool {
        self.0.contains_key(property)
    }

    pub fn id(&self) -> &str {
        self.get("Id")
    }

    pub fn is(&self, property: &str, value: &str) -> bool {
        self.get(property) == value
    }

    /// Returns whether a list of names, with blanks between them, has the name. systemctl quotes a name with a backslash for a shell.
    pub fn lists(&self, property: &str, name: &str) -> bool {
        let escaped = format!("\"{}\"", name.replace('\\', r"\\"));
        self.get(property).split_whitespace().any(|word| word == name || word == escaped)
    }

    pub fn is_loaded(&self) -> bool {
        self.is("LoadState", "loaded")
    }

    pub fn is_active(&self) -> bool {
        ["active", "activating", "reloading"].contains(&self.get("ActiveState"))
    }
}

/// Returns the properties of units. `units`: names, or patterns of loaded units. Without `--all` a pattern has no inactive unit.
pub async fn show(units: &[&str], properties: &[&str]) -> io::Result<Vec<Unit>> {
    let mut command = Command::new("systemctl");
    command.args(["show", "--no-pager", "--all"]).arg(format!("--property={}", properties.join(",")));
    command.arg("--").args(units).env("SYSTEMD_COLORS", "0").env("LC_ALL", "C");
    let ended = run(&mut command).await?;
    match ended.succeeded {
        true => Ok(parse(&ended.stdout)),
        false => Err(io::Error::other(ended.stderr)),
    }
}

/// Reads blocks of lines `KEY=VALUE`, with an empty line between them. A key again is a further value.
pub(super) fn parse(text: &str) -> Vec<Unit> {
    let mut units = vec![Unit::default()];
    for line in text.lines() {
        let Some(unit) = units.last_mut() else { break };
        if line.is_empty() {
            units.push(Unit::default());
        } else if let Some((key, value)) = line.split_once('=') {
            let own = unit.0.entry(key.to_owned()).or_default();
            if !own.is_empty() {
                own.push(' ');
            }
            own.push_str(value);
        }
    }
    units.retain(|unit| !unit.0.is_empty());
    units
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_properties_are_units() {
        let text = "Id=a.service\nBefore=b.target c.target\nEnvironment=A=1\n\n\nId=b.mount\nExecStart={ x }\nExecStart={ y }\n";
        let units = parse(text);
        assert_eq!(units.iter().map(Unit::id).collect::<Vec<_>>(), ["a.service", "b.mount"]);
        assert!(units[0].lists("Before", "c.target") && !units[0].lists("Before", "target"));
        assert_eq!((units[0].get("Environment"), units[1].get("ExecStart")), ("A=1", "{ x } { y }"));
        assert!(parse("garbage\n\n").is_empty());
    }
}

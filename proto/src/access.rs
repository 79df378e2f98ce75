//! Rights in the D-Bus contract, read from its comments. The tests of csid expect what stands there.

use crate::DBUS_INTERFACE_XML as XML;

/// Returns the line `Access:` of a method's comment, without the title. `None`: the contract has no such method.
///
/// The members of D-Bus' own interfaces need what properties need.
pub fn of(interface: &str, method: &str) -> Option<&'static str> {
    const READ: &str = "org.csid1.read";
    if !interface.starts_with("org.csid1.") {
        return Some(READ);
    }
    let (_, text) = XML.split_once(&format!("<interface name=\"{interface}\">"))?;
    let (text, _) = text.split_once("</interface>")?;
    let (before, _) = text.split_once(&format!("<method name=\"{method}\""))?;
    let (_, comment) = before.rsplit_once("<!--")?;
    comment.lines().find_map(|line| line.trim().strip_prefix("Access: "))
}

/// Returns the action at the beginning of an access line: the one that every call of the method needs.
pub fn action(line: &str) -> &str {
    let end = line.find(|c: char| !c.is_ascii_alphanumeric() && !".-".contains(c));
    &line[..end.unwrap_or(line.len())]
}

/// Returns whether group csid has the action where csid does not ask polkit.
pub fn group_has(action: &str) -> bool {
    let (_, text) = XML.split_once("group csid has\n").unwrap_or_default();
    let (actions, _) = text.split_once(", and other users").unwrap_or_default();
    actions.split([' ', ',', '\n']).any(|word| word == action)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn access_is_read_from_the_contract() {
        let manager = |method| of("org.csid1.Manager", method);
        assert_eq!(manager("Mount"), Some("org.csid1.mount; inline also org.csid1.inline"));
        assert_eq!(action(manager("Mount").unwrap()), "org.csid1.mount");
        assert_eq!(action(manager("AdoptMount").unwrap()), "org.csid1.manage");
        assert_eq!(manager("Probe"), None);
        assert_eq!(of("org.csid1.Plugin", "Exec"), Some("org.csid1.plugin-exec"));
        assert_eq!(of("org.freedesktop.DBus.Properties", "Get"), Some("org.csid1.read"));
    }

    /// A change of the contract that gives group csid another method has to change this list, too.
    #[test]
    fn group_csid_may_call_these_methods() {
        let expected = [
            (
                "org.csid1.read",
                "Explain GetEvents GetVolume GetVolumeStats HasMount ListClaims ListMounts ListOperations \
                 ListPlugins ListVolumes Plugin.GetCapacity Plugin.GetStats Plugin.ListExternalVolumes Plugin.ListSnapshots Plugin.Probe WaitForPlugin",
            ),
            ("org.csid1.mount", "Claim Mount OpenMount"),
            ("org.csid1.unmount", "CancelOperation Release Unmount"),
        ];
        let mut found = std::collections::BTreeMap::<&str, Vec<String>>::new();
        for text in XML.split("<interface name=\"org.csid1.").skip(1) {
            let (interface, text) = text.split_once('"').unwrap();
            let (text, _) = text.split_once("</interface>").unwrap();
            for method in text.split("<method name=\"").skip(1) {
                let (method, _) = method.split_once('"').unwrap();
                let action = action(of(&format!("org.csid1.{interface}"), method).unwrap());
                if group_has(action) {
                    let prefix = if interface == "Manager" { String::new() } else { format!("{interface}.") };
                    found.entry(action).or_default().push(format!("{prefix}{method}"));
                }
            }
        }
        for (action, methods) in expected {
            let mut found = found.remove(action).unwrap_or_default();
            found.sort();
            assert_eq!(found.join(" "), methods, "{action}");
        }
        assert!(found.is_empty(), "{found:?}");
    }

    #[test]
    fn group_csid_has_three_actions() {
        let all = ["read", "mount", "unmount", "unmount-others", "inline", "manage-volumes", "manage"];
        let has = all.into_iter().filter(|name| group_has(&format!("org.csid1.{name}")));
        assert_eq!(has.collect::<Vec<_>>(), ["read", "mount", "unmount"]);
    }
}

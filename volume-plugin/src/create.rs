//! The options of a creation, as a user types them: `--opt size=1G`, or all in one `--opt o=size=1G,plugin=local`.

use std::collections::BTreeMap;

use csid_client::{AccessMode, AttachmentMode, Capability, CreateVolume};

/// Returns csid's options of a creation.
///
/// # Errors
///
/// A text that names an unknown option or a wrong value.
pub fn options(given: &BTreeMap<String, String>) -> Result<CreateVolume, String> {
    let mut create = CreateVolume::default();
    let mut access_mode = AccessMode::SingleNodeWriter;
    let mut parameters = BTreeMap::new();
    for (key, value) in flattened(given)? {
        match key.as_str() {
            "plugin" => create.plugin = Some(value),
            "size" => create.capacity_min = Some(bytes(&value)?),
            "fs-type" => create.fs_type = Some(value),
            "access-mode" => {
                access_mode = value.parse().map_err(|_| format!("access-mode: there is no `{value}`"))?;
            }
            "mount-group" => create.mount_group = Some(value),
            "mount-flags" => {
                create.mount_flags = Some(value.split_ascii_whitespace().map(str::to_owned).collect())
            }
            "snapshot" => create.snapshot = Some(value),
            "clone" => create.clone = Some(value),
            key => match key.strip_prefix("param.") {
                Some(name) if !name.is_empty() => drop(parameters.insert(name.to_owned(), value)),
                _ => return Err(format!("there is no option `{key}`")),
            },
        }
    }
    if create.plugin.is_none() {
        return Err("the option `plugin` is missing".to_owned());
    }
    create.parameters = Some(parameters).filter(|parameters| !parameters.is_empty());
    create.capabilities = Some(vec![Capability { access_mode, attachment_mode: AttachmentMode::FileSystem }]);
    Ok(create)
}

/// Returns the options with those in `o` as options of their own. `podman kube play` sends all in `o`.
fn flattened(given: &BTreeMap<String, String>) -> Result<Vec<(String, String)>, String> {
    let mut all = Vec::new();
    for (key, value) in given {
        if key != "o" {
            all.push((key.clone(), value.clone()));
            continue;
        }
        for one in value.split(',').filter(|one| !one.is_empty()) {
            let (key, value) = one.split_once('=').ok_or_else(|| format!("o: `{one}` has no value"))?;
            all.push((key.to_owned(), value.to_owned()));
        }
    }
    Ok(all)
}

/// Returns a size in bytes. The units K, M, G and T are powers of 1024.
fn bytes(text: &str) -> Result<u64, String> {
    let wrong = || format!("size: `{text}` is no number with K, M, G or T");
    let (digits, shift) = match text.char_indices().last() {
        Some((at, unit)) if unit.is_ascii_alphabetic() => {
            let shift = "KMGT".find(unit.to_ascii_uppercase()).ok_or_else(wrong)?;
            (&text[..at], 10 * (shift + 1))
        }
        _ => (text, 0),
    };
    let number: u64 = digits.parse().map_err(|_| wrong())?;
    number.checked_mul(1 << shift).filter(|size| *size > 0).ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(given: &[(&str, &str)]) -> BTreeMap<String, String> {
        given.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn options_one_by_one_and_in_o_are_the_same() {
        let each = options(&map(&[
            ("plugin", "local"),
            ("size", "2G"),
            ("access-mode", "multi-node-multi-writer"),
            ("mount-flags", "noatime sync"),
            ("param.kind", "fast"),
        ]))
        .unwrap();
        let o = "plugin=local,size=2G,access-mode=multi-node-multi-writer,mount-flags=noatime sync,param.kind=fast";
        let in_o = options(&map(&[("o", o)])).unwrap();
        for of in [each, in_o] {
            assert_eq!((of.plugin.as_deref(), of.capacity_min), (Some("local"), Some(2 << 30)));
            assert_eq!(of.mount_flags.unwrap(), ["noatime", "sync"]);
            assert_eq!(of.parameters.unwrap()["kind"], "fast");
            assert_eq!(of.capabilities.unwrap()[0].access_mode, AccessMode::MultiNodeMultiWriter);
        }
    }

    #[test]
    fn unknown_options_and_wrong_values_are_refused() {
        let refused = |given: &[(&str, &str)]| options(&map(given)).err().unwrap();
        assert_eq!(refused(&[("size", "1G")]), "the option `plugin` is missing");
        assert_eq!(refused(&[("plugin", "p"), ("type", "nfs")]), "there is no option `type`");
        assert_eq!(refused(&[("plugin", "p"), ("param.", "x")]), "there is no option `param.`");
        for size in ["", "0", "G", "-1", "1X", "99999999999999T"] {
            assert!(refused(&[("plugin", "p"), ("size", size)]).starts_with("size:"), "{size}");
        }
        assert!(refused(&[("plugin", "p"), ("access-mode", "all")]).starts_with("access-mode:"));
        assert!(refused(&[("o", "plugin")]).starts_with("o:"));
    }
}

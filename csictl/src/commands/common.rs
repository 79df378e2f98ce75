//! Arguments and answers that several commands have.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, BufRead, IsTerminal, Read, Write},
    path::Path,
};

use anyhow::{Context, bail};
use csid_client::{SealedSecrets, Secrets, operation_id};
use zeroize::Zeroizing;

use crate::{
    args::{Name, Pair},
    hints::Tried,
    output::{plain, print},
    shell::quoted,
};

/// The limit of a file with secrets. A larger file is a mistake.
const SECRETS_LIMIT: u64 = 64 * 1024;

/// Prints the answer of a command without one: nothing for people, an empty object for programs.
pub fn done(json: bool) -> io::Result<()> {
    if json { print("{}") } else { Ok(()) }
}

/// Returns the operation's id, and stores it and the mount's name for a hint. `tag`: the options for the tag, after a space.
pub fn begin(name: &Name, tag: &str, id: Option<String>, tried: &mut Tried) -> anyhow::Result<String> {
    let id = match id {
        Some(id) => id,
        None => operation_id("csictl").context("cannot make an operation id")?,
    };
    let words = [&name.namespace, &name.volume, &name.consumer].map(|word| quoted(word));
    tried.mount = Some(words.join(" ") + tag);
    tried.volume = Some(words[..2].join(" "));
    tried.operation = Some(id.clone());
    Ok(id)
}

/// Returns the sealed secrets of a file. `None`: no file was named.
pub fn sealed(path: Option<&Path>) -> anyhow::Result<Option<SealedSecrets>> {
    path.map(|path| secrets(path)?.seal().context("cannot seal the secrets in memory")).transpose()
}

pub fn secrets(path: &Path) -> anyhow::Result<Secrets> {
    let mut source: Box<dyn Read> = if path == Path::new("-") {
        Box::new(io::stdin().lock())
    } else {
        Box::new(File::open(path).with_context(|| format!("cannot open {}", path.display()))?)
    };
    // Allocated once, because a buffer that grows leaves copies of secrets.
    let mut text = Zeroizing::new(Vec::with_capacity(SECRETS_LIMIT as usize + 1));
    source.by_ref().take(SECRETS_LIMIT + 1).read_to_end(&mut text).context("cannot read the secrets")?;
    if text.len() as u64 > SECRETS_LIMIT {
        bail!("{} is larger than 64 KiB, too large for secrets", path.display());
    }
    Secrets::from_json(&text).with_context(|| format!("cannot use {}", path.display()))
}

/// Asks for the name again, from the command line or typed, because the command cannot be undone.
pub fn confirmed(name: &str, given: &Option<String>, what: &str) -> anyhow::Result<()> {
    confirmed_by("--yes", name, given, what)
}

/// Asks for the name again, which `option` gives on the command line.
pub fn confirmed_by(option: &str, name: &str, given: &Option<String>, what: &str) -> anyhow::Result<()> {
    let typed = match given {
        Some(typed) => typed.clone(),
        None if !io::stdin().is_terminal() => {
            bail!("{what} To confirm it on the command line: {option} {}", quoted(name));
        }
        None => {
            eprint!("{what}\nType {} to continue: ", plain(name));
            io::stderr().flush()?;
            let mut typed = String::new();
            io::stdin().lock().read_line(&mut typed)?;
            typed.trim_end_matches(['\n', '\r']).to_owned()
        }
    };
    match typed == name {
        true => Ok(()),
        false => bail!("that is not {}: nothing was done", plain(name)),
    }
}

/// Returns the option of a flag. An absent flag sends no option.
pub fn yes(flag: bool) -> Option<bool> {
    flag.then_some(true)
}

pub fn some<T>(list: Vec<T>) -> Option<Vec<T>> {
    (!list.is_empty()).then_some(list)
}

pub fn pairs(pairs: Vec<Pair>) -> Option<BTreeMap<String, String>> {
    (!pairs.is_empty()).then(|| pairs.into_iter().map(|Pair(key, value)| (key, value)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_about_secrets_shows_none() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("secrets");
        std::fs::write(&path, r#"{"password": ["hunter2"]}"#).unwrap();
        let error = format!("{:#}", secrets(&path).map(|_| ()).unwrap_err());
        assert!(error.contains("not a JSON object of strings") && !error.contains("hunter2"), "{error}");
        std::fs::write(&path, vec![b' '; 70_000]).unwrap();
        assert!(secrets(&path).is_err_and(|error| error.to_string().contains("larger than 64 KiB")));
    }
}

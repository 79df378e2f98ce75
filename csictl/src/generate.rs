//! Completions and man pages for packages, both made from the command line's definition.

use std::{fs::File, io, path::Path};

use clap::{Command, CommandFactory};
use clap_complete::Shell;
use clap_mangen::{
    Man,
    roff::{Roff, bold, roman},
};

use crate::args::Cli;

pub fn completions(shell: Shell, out: &mut dyn io::Write) {
    clap_complete::generate(shell, &mut Cli::command(), "csictl", out);
}

/// csictl(1), and a page for each subcommand.
pub fn man(directory: &Path) -> io::Result<()> {
    std::fs::create_dir_all(directory)?;
    clap_mangen::generate_to(Cli::command(), directory)?;
    let mut command = Cli::command();
    command.build();
    main_page(command, &mut File::create(directory.join("csictl.1"))?)
}

const EXAMPLES: [(&str, &str); 8] = [
    (
        "Make a volume with csid's own driver, mount it for a job, and use it:",
        "id=$(csi-local create data --size 1G)\n\
         csictl mount default data job --plugin local --external-id $id --restore auto\n\
         csictl mounts",
    ),
    (
        "Register a driver that runs already, and wait for it:",
        "csictl plugin register nfs --socket /run/nfs/csi.sock\n\
         csictl wait nfs --deadline 1min",
    ),
    (
        "Mount with secrets that no other user can read:",
        "csictl mount default db job --plugin ebs --external-id vol-1 --secrets-file - <secrets.json",
    ),
    (
        "Register a volume once, then mount it by its name. The mount claims it, or names the holders in the way:",
        "csictl volume register prod db --plugin local --external-id $id --access-mode single-node-writer\n\
         csictl mount prod db postgres --target /srv/db\n\
         csictl claims",
    ),
    ("Follow events as JSON:", "csictl events --follow --json"),
    ("Cancel an operation that hangs:", "csictl operations\ncsictl cancel ID"),
    (
        "See the nodes of a cluster, and block one whose key was stolen:",
        "csictl node list\n\
         csictl node block db-1 --reason theft",
    ),
    (
        "As an operator of a cluster, register a volume, see who has claimed it, and have the claim released:",
        "csictl --operator volume register prod db --plugin nfs --external-id vol-1 --access-mode single-node-writer\n\
         csictl --operator claims --namespace prod --volume db\n\
         csictl --operator release prod db postgres --node db-1",
    ),
];

const EXIT: [(&str, &str); 7] = [
    ("0", "Success. has-mount: it is mounted. volume validate: it is confirmed."),
    (
        "1",
        "Failure, with the reason and the next step on standard error. has-mount and volume validate: no. doctor: it found an error.",
    ),
    ("2", "The command line was wrong. doctor: csid cannot be reached."),
    ("3", "has-mount or volume validate failed."),
    ("125", "plugin exec could not start the command. Its other codes come from the command."),
    ("130", "Ctrl-C during an operation. The operation continues: csictl cancel ID ends it."),
    ("143", "SIGTERM during an operation. The same."),
];

fn main_page(command: Command, out: &mut dyn io::Write) -> io::Result<()> {
    let man = Man::new(command);
    man.render_title(out)?;
    man.render_name_section(out)?;
    man.render_synopsis_section(out)?;
    man.render_description_section(out)?;
    man.render_options_section(out)?;
    man.render_subcommands_section(out)?;
    let mut roff = Roff::new();
    roff.control("SH", ["EXAMPLES"]);
    for (what, commands) in EXAMPLES {
        roff.text([roman(what)]).control("PP", []).control("RS", ["4"]).control("nf", []);
        for line in commands.lines() {
            roff.text([roman(line)]);
        }
        roff.control("fi", []).control("RE", []).control("PP", []);
    }
    roff.control("SH", ["EXIT STATUS"]);
    for (code, meaning) in EXIT {
        roff.control("TP", []).text([bold(code)]).text([roman(meaning)]);
    }
    roff.control("SH", ["ENVIRONMENT"]);
    roff.control("TP", []).text([bold("CSID_SOCKET")]).text([roman(
        "The private socket, if neither --csid-socket nor --bus is given. csictl then tries no other way.",
    )]);
    roff.control("TP", []).text([bold("CSID_OPERATOR")]).text([roman(
        "The file of an operator, if --operator=FILE is not given: servers, ca, certificate and key.",
    )]);
    roff.control("TP", [])
        .text([bold("DBUS_SYSTEM_BUS_ADDRESS")])
        .text([roman("The system bus, as for every D-Bus program.")]);
    roff.control("SH", ["FILES"]);
    roff.control("TP", []).text([bold("/run/csid/csid.sock")]).text([roman("csid's private socket.")]);
    roff.control("TP", [])
        .text([bold("~/.config/csid/operator.toml")])
        .text([roman("The file of an operator. /usr/share/doc/csid/docs/cluster-install.md describes it.")]);
    roff.control("TP", [])
        .text([bold("/usr/share/doc/csid/docs/troubleshooting.md")])
        .text([roman("States and errors, their meanings, and what ends them.")]);
    roff.control("SH", ["SEE ALSO"]).text([roman("csid(8), csid-server(8), systemctl(1), journalctl(1)")]);
    roff.to_writer(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn completions_have_no_internal_command() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let mut script = Vec::new();
            completions(shell, &mut script);
            let script = String::from_utf8(script).unwrap();
            assert!(script.contains("wait-volumes"), "{shell}");
            assert!(!script.contains("doctor-state") && !script.contains("gen-man"), "{shell}");
        }
    }

    #[test]
    fn every_command_has_a_man_page() {
        let directory = tempfile::tempdir().unwrap();
        man(directory.path()).unwrap();
        let main = std::fs::read_to_string(directory.path().join("csictl.1")).unwrap();
        for heading in [".SH EXAMPLES", ".SH \"EXIT STATUS\"", ".SH ENVIRONMENT", "/docs/troubleshooting.md"]
        {
            assert!(main.contains(heading), "{heading}");
        }
        for page in [
            "csictl-mount.1",
            "csictl-volume-register.1",
            "csictl-claim.1",
            "csictl-plugin-register.1",
            "csictl-events.1",
            "csictl-node-accept.1",
            "csictl-server-list.1",
        ] {
            assert!(directory.path().join(page).exists(), "{page}");
        }
        assert!(!directory.path().join("csictl-gen-man.1").exists());
    }

    #[test]
    fn examples_are_commands_that_csictl_takes() {
        use clap::Parser;

        let lines = EXAMPLES.iter().flat_map(|(_, commands)| commands.lines());
        for line in lines.filter(|line| line.starts_with("csictl")) {
            let words = line.split_whitespace().take_while(|word| !word.starts_with('<'));
            Cli::try_parse_from(words).unwrap_or_else(|error| panic!("{line}: {error}"));
        }
    }
}

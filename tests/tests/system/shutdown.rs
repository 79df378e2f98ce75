//! The order in which a machine goes down.

use crate::machine::Machine;

/// csid, then the volumes, then their plugins: each is there while what needs it ends.
#[test]
fn at_shutdown_volumes_are_unmounted_while_their_plugin_runs() {
    let m = Machine::with_csid();
    m.run("csictl wait local");
    let id = m.run("csi-local create data --size 64M");
    m.run(&format!("csictl mount demo data web --plugin local --external-id {id}"));
    m.reboot();
    let journal = m.run("journalctl --no-pager --boot=-1 --output=cat");
    let position = |text: &str| -> Vec<usize> {
        journal.lines().enumerate().filter(|(_, line)| line.starts_with(text)).map(|(at, _)| at).collect()
    };
    let csid = position("Stopped csid.service");
    let volumes = position("Unmounted var-lib-csid-");
    let plugin = position("Stopped csi-plugin-local-default.service");
    assert_eq!((csid.len(), volumes.len(), plugin.len()), (1, 2, 1), "staged and published: {journal}");
    assert!(csid[0] < volumes[0] && volumes[1] < plugin[0], "{csid:?} {volumes:?} {plugin:?}");
    assert!(!journal.contains("ordering cycle"), "{journal}");
}

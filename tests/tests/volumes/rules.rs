//! The rules that csid alone can break with volumes of its own: the witness, which stands before every plugin here and in
//! `claims`, has to have had something to hold against each. What breaks one fails its test.

use std::time::Duration;

use csid_client::{
    AccessMode, CallOptions, ClaimMode, ClaimOptions, CreateVolume, ExpandOptions, MountOptions,
    RegisterVolume, ReleaseOptions, VolumeOptions,
};
use csid_tests::ask::{NAMESPACE, capabilities, secrets};
use csid_tests::clustered;
use csid_tests::script::{Act, Rule};
use csid_tests::world::{count, world};

use crate::site::{PASSWORD, Site, creating, expands_offline, options, spec};

const RULES: [u8; 9] = [20, 23, 26, 27, 31, 32, 33, 35, 39];

#[test]
fn witness_checks_every_rule_on_volumes() {
    world(async |w| {
        let mut s = creating(w).await;
        s.w.plugin("p").set(|script| script.capabilities.push("GET_VOLUME_STATS".to_owned()));
        expands_offline(&mut s).await;
        // Servers take no secrets of a caller.
        let given = || (!clustered::is_used()).then(|| secrets(&[("password", PASSWORD)]));
        let claim = async |s: &Site<'_>, volume: &str, mode| {
            let options = ClaimOptions { mode: Some(mode), secrets: given(), ..ClaimOptions::default() };
            s.client.claim(NAMESPACE, volume, "job", options).await.unwrap();
            let options = MountOptions {
                read_only: Some(mode == ClaimMode::Read),
                secrets: given(),
                ..MountOptions::default()
            };
            s.client.mount(NAMESPACE, volume, "job", options).await.unwrap();
            s.client.volume_stats(NAMESPACE, volume, CallOptions::default()).await.unwrap();
            let options = ReleaseOptions { secrets: given(), ..ReleaseOptions::default() };
            s.client.release(NAMESPACE, volume, "job", options).await.unwrap();
        };
        // Made by a call whose answer was lost, and asked for again.
        s.rules([Rule::once("CreateVolume", Act::FailAfter(13))]);
        s.create("made", CreateVolume { secrets: given(), ..spec() }).await.unwrap();
        claim(&s, "made", ClaimMode::Write).await;
        let patience = Some(Duration::from_secs(10).as_micros() as u64);
        let expand = ExpandOptions { deadline_usec: patience, secrets: given(), ..ExpandOptions::default() };
        s.client.expand_volume(NAMESPACE, "made", 8 << 20, 0, expand).await.unwrap();
        claim(&s, "made", ClaimMode::Write).await;
        // An operator's, for readers.
        s.w.plugin("p").provision("given");
        let register = RegisterVolume {
            plugin: Some("p".to_owned()),
            external_id: Some("given".to_owned()),
            capabilities: Some(capabilities(&[AccessMode::SingleNodeReaderOnly])),
            secrets: given(),
            ..RegisterVolume::default()
        };
        s.client.register_volume(NAMESPACE, "given", register).await.unwrap();
        claim(&s, "given", ClaimMode::Read).await;

        for rule in RULES {
            let looks = s.w.looks_at(rule);
            count(&format!("looks at CSI rule {rule}"), looks as usize);
            assert!(looks > 0, "rule {rule}");
        }
        s.delete("made", VolumeOptions { secrets: given(), ..options() }).await.unwrap();
        s.delete("given", options()).await.unwrap();
        s.nothing_left().await;
    });
}

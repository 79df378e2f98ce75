//! Secrets: they reach the plugin, and nothing else. A mount that needs them after a reboot waits for them.

use std::fs;
use std::time::Duration;

use csid_client::{Kind, MountOptions, Restore};
use csid_tests::ask::*;
use csid_tests::world::{eventually, refusal, world};

const CANARY: &str = "c4n4ry-s3cr3t-4242";

fn with_secrets(volume: &str) -> MountOptions {
    MountOptions {
        secrets: Some(secrets(&[("password", CANARY)])),
        restore: Some(Restore::Auto),
        ..inline(volume)
    }
}

#[test]
fn without_a_credential_a_reboot_leaves_it_waiting() {
    world(async |w| {
        let client = running(w).await;
        mount(&client, "job", with_secrets("v")).await.unwrap();
        for call in w.plugin("p").volume_calls() {
            assert_eq!(call.call.secrets, [("password".to_owned(), CANARY.to_owned())], "co_rule_17");
        }
        let before = cursor(&client).await;
        let calls = w.plugin("p").volume_calls().len();
        w.reboot().await;
        let client = w.start().await;
        settled(&client).await;
        event(&client, before, &["secret-required"], "default/v").await;
        assert_eq!(state(&client, "v", "job").await, "waiting");
        tokio::time::sleep(Duration::from_secs(2)).await;
        let told = events(&client, before).await;
        let asked = told.iter().filter(|e| e.kind == "secret-required").count();
        assert_eq!(asked, 1, "no error loop: {told:?}");
        assert_eq!(w.plugin("p").volume_calls().len(), calls, "nothing was tried without the secrets");

        let without = MountOptions { restore: Some(Restore::Auto), ..inline("v") };
        assert_eq!(refusal(mount(&client, "job", without).await).0, Kind::SecretRequired);
        mount(&client, "job", with_secrets("v")).await.expect("with its secrets it comes back");
        assert_eq!(state(&client, "v", "job").await, "mounted");
        unmount(&client, "v", "job").await.expect("an unmount needs no secret");
        w.nothing_left(&client).await;
        w.plugin("p").assert_rules();
    });
}

#[test]
fn with_a_credential_it_comes_back() {
    world(async |w| {
        let path = w.path("credentials/csid.default.v");
        fs::write(&path, format!(r#"{{"password":"{CANARY}"}}"#)).unwrap();
        let options = || MountOptions {
            credential: Some("csid.default.v".to_owned()),
            restore: Some(Restore::Auto),
            ..inline("v")
        };
        let client = running(w).await;
        mount(&client, "job", options()).await.unwrap();
        w.reboot().await;
        let client = w.start().await;
        eventually("it is back", async || state(&client, "v", "job").await == "mounted").await;
        let stages: Vec<_> = w.plugin("p").volume_calls();
        assert_eq!(stages.len(), 4);
        for call in &stages {
            assert_eq!(call.call.secrets, [("password".to_owned(), CANARY.to_owned())]);
        }
        unmount(&client, "v", "job").await.unwrap();

        for wrong in ["no-such-credential", "../csid.default.v", "a/b", ""] {
            let options = MountOptions { credential: Some(wrong.to_owned()), ..inline("w") };
            let (kind, error) = refusal(mount(&client, "job", options).await);
            let due = [Kind::InvalidArgument, Kind::NotFound, Kind::SecretRequired];
            assert!(due.contains(&kind), "{wrong}: {error}");
        }
        let both = MountOptions { secrets: Some(secrets(&[("a", "b")])), ..options() };
        assert_eq!(refusal(mount(&client, "job", both).await).0, Kind::InvalidArgument);
        w.nothing_left(&client).await;
    });
}

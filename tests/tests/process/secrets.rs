//! Secrets: they reach the plugin, and nothing else. A mount that needs them after a reboot waits for them.

use std::fs;

use csid_client::{Kind, MountOptions, Restore};
use csid_tests::ask::*;
use csid_tests::plugin::Recorded;
use csid_tests::script::{Act, Rule};
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
        // csid retries the restore of this volume.
        mount(&client, "job", MountOptions { restore: Some(Restore::Auto), ..inline("retried") })
            .await
            .unwrap();
        let fails = Rule { times: 4, ..Rule::always("NodeStageVolume", Act::Fail(14)) };
        w.plugin("p").rules([fails.of("retried")]);
        let of_v = |calls: &[Recorded]| calls.iter().filter(|call| call.call.volume == "v").count();
        let before = cursor(&client).await;
        let calls = of_v(&w.plugin("p").volume_calls());
        w.reboot().await;
        let client = w.start().await;
        settled(&client).await;
        event(&client, before, &["secret-required"], "default/v").await;
        assert_eq!(state(&client, "v", "job").await, "waiting");
        eventually("a retried restore is done", async || state(&client, "retried", "job").await == "mounted")
            .await;
        let answer = events(&client, before).await;
        let asked = answer.iter().filter(|e| e.kind == "secret-required").count();
        assert_eq!(asked, 1, "no error loop: {answer:?}");
        assert_eq!(of_v(&w.plugin("p").volume_calls()), calls, "nothing was tried without the secrets");

        let without = MountOptions { restore: Some(Restore::Auto), ..inline("v") };
        assert_eq!(refusal(mount(&client, "job", without).await).0, Kind::SecretRequired);
        mount(&client, "job", with_secrets("v")).await.expect("with its secrets it comes back");
        assert_eq!(state(&client, "v", "job").await, "mounted");
        unmount(&client, "v", "job").await.expect("an unmount needs no secret");
        unmount(&client, "retried", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn mount_with_a_credential_is_restored() {
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
        let mut made = w.plugin("p").volume_calls();
        made.retain(|call| !call.call.rpc.contains("Un"));
        assert_eq!(made.len(), 4);
        for call in &made {
            assert_eq!(call.call.secrets, [("password".to_owned(), CANARY.to_owned())]);
        }
        unmount(&client, "v", "job").await.unwrap();

        for (wrong, due) in [
            ("no-such-credential", Kind::SecretRequired),
            ("../csid.default.v", Kind::InvalidArgument),
            ("a/b", Kind::InvalidArgument),
            ("", Kind::InvalidArgument),
        ] {
            let options = MountOptions { credential: Some(wrong.to_owned()), ..inline("w") };
            let (kind, error) = refusal(mount(&client, "job", options).await);
            assert_eq!(kind, due, "{wrong}: {error}");
        }
        let both = MountOptions { secrets: Some(secrets(&[("a", "b")])), ..options() };
        assert_eq!(refusal(mount(&client, "job", both).await).0, Kind::InvalidArgument);
        w.nothing_left(&client).await;
    });
}

/// Users of one volume may have other secrets, or none. The plugin knows them all, csid at each call only the caller's.
#[test]
fn secrets_of_other_users_are_not_reported() {
    world(async |w| {
        let words = format!("cannot log in with {CANARY}");
        let says = |rpc: &str| Rule::always(rpc, Act::Say(3, words.clone()));
        let with =
            |value: &str| MountOptions { secrets: Some(secrets(&[("password", value)])), ..shared("v") };
        // A refused caller learns that something is withheld, and nothing else.
        let silent = |error: &csid_client::CsidError| {
            let answer = format!("{error:?}");
            assert!(!answer.contains(CANARY) && answer.contains("the plugin's words may repeat"), "{answer}");
        };
        let client = running(w).await;
        mounted(&client, "secret", with(CANARY)).await;
        mounted(&client, "open", shared("v")).await;

        w.plugin("p").rules([says("NodePublishVolume")]);
        silent(&refusal(mount(&client, "late", shared("v")).await).1);
        silent(&refusal(mount(&client, "other", with("another-secret")).await).1);
        w.plugin("p").honest();
        unmount(&client, "v", "secret").await.unwrap();

        // The row is gone; what the plugin knows is not, and passes from user to user.
        w.plugin("p").rules([says("NodePublishVolume"), says("NodeUnpublishVolume")]);
        silent(&refusal(mount(&client, "other", with("another-secret")).await).1);
        silent(&refusal(unmount(&client, "v", "open").await).1);
        w.plugin("p").honest();
        mounted(&client, "last", shared("v")).await;
        unmount(&client, "v", "open").await.unwrap();
        w.kill();
        let client = w.start().await;
        healthy(&client, "p").await;
        w.plugin("p").rules([says("NodeUnstageVolume")]);
        silent(&refusal(unmount(&client, "v", "last").await).1);
        let kept = row(&client, "v", "last").await.expect("its row").error;
        assert!(kept.contains("the plugin's words may repeat"), "{kept}");
        w.plugin("p").honest();
        unmount(&client, "v", "last").await.unwrap();
        w.nothing_left(&client).await;
        let answer = format!("{:?}", events(&client, 0).await);
        let log = fs::read_to_string(w.path("csid.log")).unwrap();
        assert!(!answer.contains(CANARY) && !log.contains(CANARY));

        // Nobody of it is left: a plugin's words are the user's own again.
        w.plugin("p").rules([Rule::always("NodePublishVolume", Act::Say(3, "no such share".to_owned()))]);
        let (_, error) = refusal(mount(&client, "new", shared("v")).await);
        assert!(error.message.contains("no such share"), "{error}");
        w.plugin("p").honest();
        w.nothing_left(&client).await;
    });
}

/// The plugin goes on, and knows the secrets that it had of the csid before.
#[test]
fn failed_probe_after_a_restart_shows_no_secret() {
    world(async |w| {
        let client = running(w).await;
        mount(&client, "job", with_secrets("v")).await.unwrap();
        let before = cursor(&client).await;
        w.kill();
        let says = Act::Say(13, format!("login of admin with {CANARY} failed"));
        w.plugin("p").rules([Rule::always("Probe", says)]);
        let client = w.start().await;
        let message = async || client.plugin("p").await.unwrap().health_message;
        eventually("the Probe has failed", async || message().await.contains("INTERNAL")).await;
        let message = message().await;
        assert!(message.contains("the plugin's words may repeat"), "{message}");
        let answer = format!("{:?}", events(&client, before).await);
        assert!(answer.contains("INTERNAL"), "{answer}");
        let log = fs::read_to_string(w.path("csid.log")).unwrap();
        assert!(![message, answer, log].iter().any(|text| text.contains(CANARY)));
        w.plugin("p").honest();
        healthy(&client, "p").await;
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

/// A mount without secrets that is gone, and comes back with some.
#[test]
fn secrets_of_a_repair_are_forgotten() {
    world(async |w| {
        let client = running(w).await;
        let source = mounted(&client, "job", inline("v")).await;
        rustix::mount::unmount(&source, rustix::mount::UnmountFlags::DETACH).unwrap();
        let again = MountOptions { secrets: Some(secrets(&[("password", CANARY)])), ..inline("v") };
        mounted(&client, "job", again).await;
        let sent = w.plugin("p").volume_calls();
        assert!(sent.iter().any(|call| !call.call.secrets.is_empty()), "{sent:?}");
        let says = Act::Say(3, format!("cannot log in with {CANARY}"));
        w.plugin("p").rules([Rule::always("NodeUnpublishVolume", says)]);
        let (_, error) = refusal(unmount(&client, "v", "job").await);
        assert!(!format!("{error:?}").contains(CANARY), "{error:?}");
        w.plugin("p").honest();
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

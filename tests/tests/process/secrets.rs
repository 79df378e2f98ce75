//! Secrets: they reach the plugin, and nothing else. A mount that needs them after a reboot waits for them.

use std::fs;
use std::time::Duration;

use csid_client::{Kind, MountOptions, Restore};
use csid_tests::ask::*;
use csid_tests::kernel;
use csid_tests::script::{Act, Rule};
use csid_tests::world::{World, count, eventually, refusal, world};

const CANARY: &str = "c4n4ry-s3cr3t-4242";
const CONTEXT: &str = "c4n4ry-c0nt3xt-4242";
const FLAG: &str = "c4n4ry-fl4g-4242";

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

/// Everything csid wrote: its log, its journal and what else is below its directories.
fn written(w: &World) -> Vec<(String, Vec<u8>)> {
    let mut files = vec![w.path("csid.log")];
    for directory in ["state", "run"] {
        files.extend(kernel::tree(&w.path(directory)).unwrap());
    }
    files
        .into_iter()
        .filter(|path| path.is_file())
        .map(|path| (path.display().to_string(), fs::read(&path).unwrap()))
        .collect()
}

fn holds(bytes: &[u8], canary: &str) -> bool {
    bytes.windows(canary.len()).any(|window| window == canary.as_bytes())
}

#[test]
fn a_canary_is_found_nowhere() {
    world(async |w| {
        w.environment.insert("CSID_LOG".to_owned(), "trace".to_owned());
        let client = running(w).await;
        let options = |volume: &str| MountOptions {
            volume_context: Some([("token".to_owned(), CONTEXT.to_owned())].into()),
            publish_context: Some([("token".to_owned(), CONTEXT.to_owned())].into()),
            mount_flags: Some(vec![FLAG.to_owned()]),
            ..with_secrets(volume)
        };
        let mut told = String::new();
        // Every failure: the plugin's own words repeat the secrets of the call.
        let words = format!("cannot log in with {CANARY} of {CONTEXT} and {FLAG}");
        let rpcs = ["NodeStageVolume", "NodePublishVolume"];
        let mut failures = 0;
        for rpc in rpcs {
            for code in 1..=16 {
                w.plugin("p").rules([Rule::always(rpc, Act::Say(code, words.clone()))]);
                let asked = mount(&client, "job", within(Duration::from_millis(300), options("v"))).await;
                let (_, error) = refusal(asked);
                told += &format!("{error} {:?}\n", error);
                failures += 1;
                w.plugin("p").honest();
                unmount(&client, "v", "job").await.unwrap();
            }
        }
        mount(&client, "job", options("v")).await.unwrap();
        let other = MountOptions { fs_type: Some("xfs".to_owned()), ..options("v") };
        told += &format!("{:?}", refusal(mount(&client, "job", other).await).1);
        told += &format!("{:?}", client.list_mounts(Default::default()).await.unwrap());
        told += &format!("{:?}", client.list_operations().await.unwrap());
        for event in events(&client, 0).await {
            told += &format!("{event:?}\n");
        }
        told += &format!("{:?} {:?}", client.manager().await.unwrap(), client.plugin("p").await.unwrap());
        for canary in [CANARY, CONTEXT, FLAG] {
            let place = told.find(canary).map(|at| &told[at.saturating_sub(200)..at]);
            assert_eq!(place, None, "{canary} was told");
        }
        let log = fs::read_to_string(w.path("csid.log")).unwrap();
        assert!(log.len() > 1000, "the log was looked at: {}", log.len());
        for canary in [CONTEXT, FLAG] {
            assert!(!log.contains(canary), "{canary} is in the log");
        }
        let mut files = written(w);
        let journal = files.iter().filter(|(name, _)| name.contains("/journal/")).count();
        assert!(journal >= 2, "the database and its WAL were looked at: {files:?}");
        // What is in memory only now may be written at the end.
        w.stop().await;
        files.extend(written(w));
        for (name, bytes) in &files {
            assert!(!holds(bytes, CANARY), "the secret is in {name}");
        }
        assert!(files.iter().any(|(_, bytes)| holds(bytes, CONTEXT)), "the journal keeps the context");
        count("failures with a canary", failures);
        count("files looked at", files.len());
    });
}

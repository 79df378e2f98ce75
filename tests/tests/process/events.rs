//! Events, the configuration and the registry of plugins.

use std::fs;
use std::time::Duration;

use csid_client::{
    CallOptions, Kind, News, PluginService, PluginSpec, ReconcileOptions, Supervision, UnregisterOptions,
};
use csid_tests::ask::*;
use csid_tests::script::Probe;
use csid_tests::world::{count, eventually, refusal, world};

#[test]
fn events_are_in_order_and_never_repeat_a_sequence() {
    world(async |w| {
        let client = running(w).await;
        let mut follower = client.follow(None).await.unwrap();
        let journal = client.manager().await.unwrap().journal_id;
        for _ in 0..5 {
            mounted(&client, "job", inline("v")).await;
            unmount(&client, "v", "job").await.unwrap();
        }
        let all = events(&client, 0).await;
        assert!(all.windows(2).all(|pair| pair[0].sequence < pair[1].sequence));
        assert!(all.windows(2).all(|pair| pair[0].realtime_usec <= pair[1].realtime_usec));
        let mounts = all.iter().filter(|e| e.kind == "mount" && e.subject == "default/v").count();
        let unmounts = all.iter().filter(|e| e.kind == "unmount" && e.subject == "default/v").count();
        assert_eq!((mounts, unmounts), (5, 5), "{all:?}");
        let mount = all.iter().find(|e| e.kind == "mount").unwrap();
        assert_eq!((detail(mount, "consumer").as_str(), detail(mount, "plugin").as_str()), ("job", "p"));
        let success = mount.details.get("success").and_then(|v| v.downcast_ref::<bool>().ok());
        assert_eq!(success, Some(true), "{mount:?}");
        // The same by signal.
        let mut reply = Vec::new();
        while reply.len() < 10 {
            match tokio::time::timeout(Duration::from_secs(5), follower.next()).await.unwrap().unwrap() {
                News::Event(event) if event.kind.ends_with("mount") => reply.push(event.sequence),
                News::Event(_) => {}
                News::Gap => panic!("a gap"),
            }
        }
        let due: Vec<_> = all.iter().filter(|e| e.kind.ends_with("mount")).map(|e| e.sequence).collect();
        assert_eq!(reply, due);

        // A cursor goes on after a kill; numbers may leap and never repeat.
        let last = cursor(&client).await;
        assert_eq!(last, all.last().unwrap().sequence);
        w.kill();
        let client = w.start().await;
        mounted(&client, "job", inline("v")).await;
        let later = events(&client, last).await;
        assert!(!later.is_empty() && later.iter().all(|e| e.sequence > last), "{later:?}");
        let (_, gap) = client.get_events(last, 10).await.unwrap();
        assert!(!gap, "nothing was lost between");
        assert_eq!(client.manager().await.unwrap().journal_id, journal);
        let (none, gap) = client.get_events(u64::MAX, 10).await.unwrap();
        assert!(none.is_empty() && gap, "a cursor beyond what was given out");
        let (page, _) = client.get_events(0, 3).await.unwrap();
        assert_eq!(page.len(), 3, "at most `max`");
        count("events", all.len() + later.len());
        unmount(&client, "v", "job").await.unwrap();
    });
}

#[test]
fn modify_index_grows_with_changes_only() {
    world(async |w| {
        let client = running(w).await;
        let index = async || client.manager().await.unwrap().modify_index;
        let before = index().await;
        mounted(&client, "job", inline("v")).await;
        let mounted_at = index().await;
        assert!(mounted_at > before);
        let found = row(&client, "v", "job").await.unwrap();
        assert!(found.modify_index > before && found.modify_index <= mounted_at, "{found:?}");
        mounted(&client, "job", inline("v")).await;
        let again = row(&client, "v", "job").await.unwrap();
        assert_eq!(again.modify_index, found.modify_index, "an answer from what is there changes no row");
        unmount(&client, "v", "job").await.unwrap();
        assert!(index().await > mounted_at);
    });
}

#[test]
fn reload_with_an_error_changes_nothing() {
    world(async |w| {
        let client = running(w).await;
        let source = mounted(&client, "job", inline("v")).await;
        let plugins = client.list_plugins().await.unwrap();
        let good = fs::read_to_string(w.path("etc/csid.toml")).unwrap();
        let wrong = [
            "operations-per-uid = \"many\"",
            "no-such-key = 1",
            "target-roots = [\"relative\"]",
            "target-roots = [\"/a/../b\"]",
            "busy-poll-usec = 10001",
            "busy-poll-usec = -1",
            "node = \"\"",
            "node = \"a\\nb\"",
            "[deadlines]\nrpc = \"soon\"",
            "not toml at all [",
        ];
        for text in wrong {
            fs::write(w.path("etc/csid.toml"), text).unwrap();
            let (kind, error) = refusal(client.reload(CallOptions::default()).await);
            assert_eq!(kind, Kind::InvalidArgument, "{text}: {error}");
            assert!(error.message.contains("csid.toml"), "the file is named: {error}");
        }
        fs::write(w.path("etc/csid.toml"), good).unwrap();
        let files = [
            ("bad.toml", "supervision = \"external\"\nsocket = \"/x.sock\"\nno-such-key = 1"),
            ("bad.toml", "supervision = \"external\""),
            ("bad.toml", "supervision = \"sometimes\"\nsocket = \"/x.sock\""),
            ("bad..id.toml", "supervision = \"external\"\nsocket = \"/x.sock\""),
        ];
        for (name, text) in files {
            let path = w.path("etc/plugins.d").join(name);
            fs::write(&path, text).unwrap();
            // A valid file next to it is not taken either.
            w.configure_plugin("good", "/nowhere/csi.sock".as_ref(), "");
            let (kind, error) = refusal(client.reload(CallOptions::default()).await);
            assert_eq!(kind, Kind::InvalidArgument, "{name}: {text}: {error}");
            assert!(error.message.contains(name), "the file is named: {error}");
            assert_eq!(client.list_plugins().await.unwrap(), plugins, "nothing changed");
            fs::remove_file(path).unwrap();
            fs::remove_file(w.path("etc/plugins.d/good.toml")).unwrap();
        }
        count("wrong configurations refused", wrong.len() + files.len());
        assert!(client.has_mount(source.to_str().unwrap()).await.unwrap());
        client.reload(CallOptions::default()).await.expect("a good one");
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn reload_adds_new_plugins() {
    world(async |w| {
        let client = running(w).await;
        let before = cursor(&client).await;
        w.add_plugin("second").await;
        client.reload(CallOptions::default()).await.unwrap();
        healthy(&client, "second").await;
        event(&client, before, &["reload"], "").await;
        event(&client, before, &["plugin-registered"], "second").await;
        mount(&client, "job", of_plugin("second", "v")).await.unwrap();
        unmount(&client, "v", "job").await.unwrap();
        w.configure("operations-per-uid = 1");
        client.reload(CallOptions::default()).await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn plugins_come_and_go_by_call() {
    world(async |w| {
        let client = running(w).await;
        let socket = w.plugin("p").witnessed_socket().to_str().unwrap().to_owned();
        let spec = || PluginSpec {
            supervision: Some(Supervision::External),
            socket: Some(socket.clone()),
            ..PluginSpec::default()
        };
        let path = client.register_plugin("by.call-1", spec()).await.unwrap();
        assert_eq!(path.as_str(), "/org/csid1/plugin/by_2ecall_2d1");
        let options = CallOptions { deadline_usec: Some(5_000_000), ..CallOptions::default() };
        let ready = client.wait_for_plugin("by.call-1", PluginService::Node, options).await.unwrap();
        assert_eq!(ready, path);
        let plugin = client.plugin("by.call-1").await.unwrap();
        assert_eq!((plugin.provider.as_str(), plugin.node_id.as_str()), ("test.csid", "node-1"));
        assert_eq!((plugin.state.as_str(), plugin.healthy, plugin.owner), ("ready", true, 0));
        assert!(plugin.services.contains(&"node".to_owned()), "{plugin:?}");
        assert!(plugin.node_capabilities.contains(&"STAGE_UNSTAGE_VOLUME".to_owned()), "{plugin:?}");
        client.register_plugin("by.call-1", spec()).await.expect("the same again is the same call");

        // It is kept over csid's restart; with mounts it goes only by force.
        mount(&client, "job", of_plugin("by.call-1", "v")).await.unwrap();
        w.kill();
        let client = w.start().await;
        healthy(&client, "by.call-1").await;
        let (kind, error) =
            refusal(client.unregister_plugin("by.call-1", UnregisterOptions::default()).await);
        assert_eq!(kind, Kind::Busy, "{error}");
        assert!(error.details.holders.iter().any(|h| h.contains("job")), "{error:?}");
        unmount(&client, "v", "job").await.unwrap();
        client.unregister_plugin("by.call-1", UnregisterOptions::default()).await.unwrap();
        assert!(client.list_plugins().await.unwrap().iter().all(|p| p.id != "by.call-1"));
        let gone = client.unregister_plugin("by.call-1", UnregisterOptions::default()).await;
        assert!(gone.is_ok() || refusal(gone).0 == Kind::NotFound);
        w.nothing_left(&client).await;
    });
}

#[test]
fn co_rule_37_probe_fails_or_is_not_ready() {
    world(async |w| {
        w.add_plugin("p").await.set(|script| script.probe = Probe::Nil);
        let client = w.start().await;
        healthy(&client, "p").await;
        assert!(client.probe_plugin("p", CallOptions::default()).await.unwrap(), "no ready is ready");
        w.plugin("p").set(|script| script.probe = Probe::NotReady);
        assert!(!client.probe_plugin("p", CallOptions::default()).await.unwrap());
        w.plugin("p").set(|script| script.probe = Probe::Fails);
        let failed = client.probe_plugin("p", CallOptions::default()).await;
        assert!(failed.is_err() || !failed.unwrap());
        eventually("unhealthy", async || !client.plugin("p").await.unwrap().healthy).await;
        assert!(!client.plugin("p").await.unwrap().health_message.is_empty());
        let options = CallOptions { deadline_usec: Some(500_000), ..CallOptions::default() };
        let (kind, error) = refusal(client.wait_for_plugin("p", PluginService::Node, options).await);
        assert_eq!(kind, Kind::TimedOut, "{error}");
        w.plugin("p").set(|script| script.probe = Probe::Ready);
        assert!(client.probe_plugin("p", CallOptions::default()).await.unwrap());
        healthy(&client, "p").await;
    });
}

#[test]
fn properties_list_the_features() {
    world(async |w| {
        let client = running(w).await;
        let manager = client.manager().await.unwrap();
        for served in [
            "mount",
            "open-mount",
            "open-mount-idmap",
            "volumes",
            "claims",
            "attach",
            "restart",
            "log",
            "stats",
            "unit",
            "accept-node-id",
            "drain",
            "upgrade",
        ] {
            assert!(manager.features.contains(&served.to_owned()), "{served}: {manager:?}");
        }
        assert!(!manager.features.contains(&"exec".to_owned()), "only where csid.toml allows it");
        assert!(!manager.version.is_empty() && manager.journal_id.len() >= 16);
        eventually("ready", async || client.manager().await.unwrap().state == "ready").await;
        client.reconcile(ReconcileOptions::default()).await.unwrap();
    });
}

#[test]
fn systemd_is_notified() {
    world(async |w| {
        w.add_plugin("q").await.kill();
        let client = running(w).await;
        mounted(&client, "job", inline("v")).await;
        // A status line worth reading.
        let (plugins, mounts) = ("2 plugins (1 healthy)", "1 mount");
        eventually(&format!("a status with `{plugins}` and `{mounts}`"), async || {
            w.status().contains(plugins) && w.status().contains(mounts)
        })
        .await;
        assert!(!w.notified("RELOADING=1"));
        client.reload(CallOptions::default()).await.unwrap();
        eventually("RELOADING", async || w.notified("RELOADING=1")).await;
        // A reload that ends at once need not say so.
        eventually("that it may take its time", async || {
            client.reload(CallOptions::default()).await.unwrap();
            w.notified("EXTEND_TIMEOUT_USEC=60000000")
        })
        .await;
        unmount(&client, "v", "job").await.unwrap();
        w.stop().await;
        eventually("STOPPING", async || w.notified("STOPPING=1")).await;
    });
}

/// The changes of many calls are notified soon, and then csid rests. It has no more than one status line between a watchdog
/// notification and the third after it. The loop of csid that writes a pending status line is the one that feeds the watchdog.
#[test]
fn systemd_is_not_notified_without_changes() {
    world(async |w| {
        // csid feeds the watchdog once a second.
        w.environment.insert("WATCHDOG_USEC".to_owned(), "2000000".to_owned());
        let client = running(w).await;
        for _ in 0..20 {
            mounted(&client, "job", inline("v")).await;
            unmount(&client, "v", "job").await.unwrap();
        }
        w.nothing_left(&client).await;
        let ended = w.notifications().len();
        eventually("csid rests for three seconds", async || {
            let since = &w.notifications()[ended..];
            let fed: Vec<_> = (0..since.len()).filter(|at| since[*at] == "WATCHDOG=1").collect();
            let lines = |of: &[String]| of.iter().filter(|line| line.starts_with("STATUS=")).count();
            fed.windows(4).any(|fed| lines(&since[fed[0]..fed[3]]) < 2)
        })
        .await;
        // A change is notified afterwards, so csid has not stopped writing status lines.
        mounted(&client, "job", inline("v")).await;
        eventually("a status line about the mount", async || w.status().contains("1 mounts")).await;
        unmount(&client, "v", "job").await.unwrap();
    });
}

#[test]
fn plugin_without_a_name_or_node_is_not_healthy() {
    world(async |w| {
        w.add_plugin("p").await.set(|script| script.name.clear());
        w.add_plugin("q").await.set(|script| script.node_id.clear());
        // co_rule_11: over-long answers are taken, with a warning.
        w.add_plugin("long").await.set(|script| script.node_id = "n".repeat(300));
        let client = w.start().await;
        healthy(&client, "long").await;
        assert_eq!(client.plugin("long").await.unwrap().node_id.len(), 300);
        for plugin in ["p", "q"] {
            eventually("it says why", async || {
                let plugin = client.plugin(plugin).await.unwrap();
                !plugin.healthy && !plugin.health_message.is_empty()
            })
            .await;
            let options = within(Duration::from_millis(500), of_plugin(plugin, "v"));
            assert_eq!(refusal(mount(&client, "job", options).await).0, Kind::PluginUnavailable, "{plugin}");
        }
        w.plugin("p").set(|script| script.name = "named".to_owned());
        eventually("it is healed", async || client.probe_plugin("p", CallOptions::default()).await.is_ok())
            .await;
    });
}

//! What only a controller does: validate, expand, snapshot, attach for a scheduler; and two instances of it.

use std::time::{Duration, Instant};

use csid_client::{
    AccessMode, AttachOptions, DeregisterOptions, DetachOptions, Error, ExpandOptions, Kind, PluginSpec,
    Supervision, UnregisterOptions,
};
use csid_tests::ask::*;
use csid_tests::fault::Fault;
use csid_tests::script::{Act, Rule};
use csid_tests::world::{World, eventually, refusal, world};

use crate::*;

/// Starts csid as [`attaching`] does, with more capabilities.
async fn able(w: &mut World, controller: &[&str]) -> Client {
    let plugin = w.add_plugin_and("p", &[], "").await;
    plugin.set(|script| {
        script.control(controller);
        script.plugin.push("ONLINE".to_owned());
        script.capabilities.push("EXPAND_VOLUME".to_owned());
        script.capabilities.push("GET_VOLUME_STATS".to_owned());
    });
    plugin.kill();
    plugin.start().await;
    plugin.provision("v");
    let client = w.start().await;
    healthy(&client, "p").await;
    client
}

fn writer(volume: &str) -> RegisterVolume {
    RegisterVolume {
        plugin: Some("p".to_owned()),
        external_id: Some(volume.to_owned()),
        capabilities: Some(capabilities(&[AccessMode::SingleNodeWriter])),
        ..RegisterVolume::default()
    }
}

#[test]
fn co_rule_35_registration_validates_capabilities() {
    world(async |w| {
        let client = attaching(w).await;
        let (kind, error) = refusal(client.register_volume(NAMESPACE, "w", writer("no-such-volume")).await);
        assert_eq!(kind, Kind::NotFound, "{error}");
        let unknown = RegisterVolume { plugin: Some("q".to_owned()), ..writer("v") };
        assert_eq!(refusal(client.register_volume(NAMESPACE, "v", unknown).await).0, Kind::NotFound);
        assert!(client.list_volumes(Default::default()).await.unwrap().is_empty(), "nothing was changed");

        client.register_volume(NAMESPACE, "v", writer("v")).await.unwrap();
        client.register_volume(NAMESPACE, "v", writer("v")).await.unwrap();
        let (kind, error) = refusal(client.register_volume(NAMESPACE, "other-name", writer("v")).await);
        assert_eq!(kind, Kind::AlreadyExists, "one name for one external id");
        // A server's failure has it in its message alone.
        let named = (!clustered::is_used()).then_some("v");
        assert_eq!(error.details.volume.as_deref(), named, "the one that is in the way");
        assert!(error.message.contains("default/v"), "{error}");
        // No server guards a volume that is mounted without a registration.
        if !clustered::is_used() {
            assert_eq!(refusal(mount(&client, "job", inline("v")).await).0, Kind::AlreadyExists);
        }
        eventually("the plugin confirms the volume", async || {
            match client.validate_volume(NAMESPACE, "v", Default::default()).await {
                Ok(validated) => validated.confirmed,
                // The servers learn of the controller after the node has joined.
                Err(Error::Csid(error)) if clustered::is_used() && error.kind == Kind::Unavailable => false,
                Err(error) => panic!("{error}"),
            }
        })
        .await;

        // Servers name the claim's node, too.
        let holder = if clustered::is_used() { "host/one" } else { "one" };
        claim(&client, "v", "one").await.unwrap();
        let deregister = || client.deregister_volume(NAMESPACE, "v", DeregisterOptions::default());
        let (kind, error) = refusal(deregister().await);
        assert_eq!((kind, error.details.holders), (Kind::Busy, vec![holder.to_owned()]));
        // A claim is not unmounted.
        let (kind, error) = refusal(client.delete_volume(NAMESPACE, "v", Default::default()).await);
        let answer = error.message.ends_with("is claimed by one");
        assert!(kind == Kind::Busy && answer && error.details.holders == [holder], "{error:?}");
        release(&client, "v", "one").await.unwrap();
        // Servers answer a Release before they have the volume detached.
        eventually("it is deregistered", async || match deregister().await {
            Err(Error::Csid(error)) if clustered::is_used() && error.kind == Kind::Busy => false,
            deregistered => deregistered.map(|()| true).unwrap(),
        })
        .await;
        deregister().await.unwrap();
        assert_eq!(refusal(client.volume(NAMESPACE, "v").await).0, Kind::NotFound);
        w.nothing_left(&client).await;
    });
}

#[test]
fn expansion_reaches_node_now_or_with_next_mount() {
    world(async |w| {
        let client = able(w, &["EXPAND_VOLUME"]).await;
        client.register_volume(NAMESPACE, "v", writer("v")).await.unwrap();
        let expand = |to: u64| client.expand_volume(NAMESPACE, "v", to, 0, ExpandOptions::default());
        mount_registered(&client, "v", "one").await.unwrap();
        let now = expand(8 << 20).await.unwrap();
        assert_eq!((now.capacity_bytes, now.node_expansion_required), (8 << 20, false));
        assert_eq!(w.plugin("p").count("NodeExpandVolume", "v"), 1);
        unmount(&client, "v", "one").await.unwrap();

        let later = expand(16 << 20).await.unwrap();
        assert_eq!((later.capacity_bytes, later.node_expansion_required), (16 << 20, true));
        assert_eq!(client.volume(NAMESPACE, "v").await.unwrap().pending_expand, 16 << 20);
        w.kill();
        let client = w.start().await;
        healthy(&client, "p").await;
        mount_registered(&client, "v", "two").await.unwrap();
        eventually("it is remembered over csid's end", async || {
            client.volume(NAMESPACE, "v").await.unwrap().pending_expand == 0
        })
        .await;
        assert_eq!(w.plugin("p").count("NodeExpandVolume", "v"), 2);
        let row = client.volume(NAMESPACE, "v").await.unwrap();
        assert_eq!((row.capacity, row.pending_expand), (16 << 20, 0));

        let expand =
            |to: u64, limit: u64| client.expand_volume(NAMESPACE, "v", to, limit, ExpandOptions::default());
        assert_eq!(expand(0, 0).await.unwrap().capacity_bytes, 16 << 20, "nothing is asked");
        assert_eq!(refusal(expand(8 << 20, 4 << 20).await).0, Kind::InvalidArgument);
        assert_eq!(refusal(expand(1, 8 << 20).await).0, Kind::InvalidArgument, "less than it has");
        assert_eq!(expand(8 << 20, 0).await.unwrap().capacity_bytes, 16 << 20);
        assert_eq!(w.plugin("p").count("ControllerExpandVolume", "v"), 2);
        unmount(&client, "v", "two").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn scheduler_attaches_and_detaches_by_itself() {
    alone(UNREGISTERED, async |w| {
        let client = attaching(w).await;
        let options = || AttachOptions {
            plugin: Some("p".to_owned()),
            external_id: Some("v".to_owned()),
            capabilities: Some(capabilities(&[AccessMode::SingleNodeWriter])),
            ..AttachOptions::default()
        };
        let context = client.attach_volume(NAMESPACE, "v", "node-2", options()).await.unwrap();
        assert!(!context.is_empty());
        assert_eq!(client.attach_volume(NAMESPACE, "v", "node-2", options()).await.unwrap(), context);
        assert_eq!(w.plugin("p").count("ControllerPublishVolume", "v"), 1, "the same call again");
        w.kill();
        let client = w.start().await;
        healthy(&client, "p").await;
        client.detach_volume(NAMESPACE, "v", "node-2", Default::default()).await.unwrap();
        client.detach_volume(NAMESPACE, "v", "node-2", Default::default()).await.unwrap();
        assert_eq!(w.plugin("p").count("ControllerUnpublishVolume", "v"), 1);
        w.nothing_left(&client).await;

        // What a claim has attached is not touched.
        client.register_volume(NAMESPACE, "v", writer("v")).await.unwrap();
        claim(&client, "v", "one").await.unwrap();
        let detach = client.detach_volume(NAMESPACE, "v", "node-1", Default::default()).await;
        assert_eq!(refusal(detach).0, Kind::ClaimConflict);
        release(&client, "v", "one").await.unwrap();
        w.nothing_left(&client).await;
    });
}

/// csid could never detach an attachment that such a plugin does not make.
#[test]
fn plugin_without_attach_is_not_asked_to() {
    world(async |w| {
        let client = able(w, &["EXPAND_VOLUME"]).await;
        let options = AttachOptions {
            plugin: Some("p".to_owned()),
            external_id: Some("v".to_owned()),
            capabilities: Some(capabilities(&[AccessMode::SingleNodeWriter])),
            ..AttachOptions::default()
        };
        let attach = client.attach_volume(NAMESPACE, "mine", "node-1", options).await;
        assert_eq!(refusal(attach).0, Kind::NotSupported);
        mount(&client, "job", inline("v")).await.expect("nobody has it");
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn hung_controllers_load_goes_to_the_other_one() {
    world(async |w| {
        let client = attaching(w).await;
        // The one of plugins.d has but one instance: both are registered here.
        let mut sockets = vec![w.plugin("p").witnessed_socket()];
        sockets.push(w.add_instance("p", "second").await.witnessed_socket());
        for (instance, socket) in ["first", "second"].iter().zip(&sockets) {
            let spec = PluginSpec {
                supervision: Some(Supervision::External),
                socket: Some(socket.to_string_lossy().into_owned()),
                instance: Some((*instance).to_owned()),
                ..PluginSpec::default()
            };
            client.register_plugin("two", spec).await.unwrap();
        }
        healthy(&client, "two").await;
        for volume in ["a", "b", "c", "d"] {
            w.plugin("p").provision(volume);
            let spec = RegisterVolume { plugin: Some("two".to_owned()), ..writer(volume) };
            client.register_volume(NAMESPACE, volume, spec).await.unwrap();
        }
        let slow = || Rule::always("ControllerPublishVolume", Act::Delay(400));
        w.plugin("p").rules([slow()]);
        w.plugin("p.second").rules([slow()]);
        let calls = ["a", "b", "c", "d"].map(|volume| {
            let client = client.clone();
            tokio::spawn(async move { claim(&client, volume, "one").await.map(drop) })
        });
        for call in calls {
            call.await.unwrap().unwrap();
        }
        let count = |w: &mut World, name: &str| w.plugin(name).count("ControllerPublishVolume", "");
        assert_eq!((count(w, "p"), count(w, "p.second")), (2, 2), "the least in flight is asked");

        let since = cursor(&client).await;
        w.plugin("p.second").kill();
        w.honest();
        eventually("csid has noticed its end", async || {
            let mut events = events(&client, since).await.into_iter();
            events.any(|event| {
                event.kind == "plugin-health"
                    && event.subject == "two"
                    && detail(&event, "instance") == "second"
            })
        })
        .await;
        for volume in ["a", "b", "c", "d"] {
            release(&client, volume, "one").await.unwrap();
        }
        let detached = |w: &mut World| w.plugin("p").count("ControllerUnpublishVolume", "");
        if clustered::is_used() {
            eventually("servers have them detached", async || detached(w) >= 4).await;
        }
        assert_eq!(detached(w), 4);
        w.nothing_left(&client).await;
    });
}

#[test]
fn secrets_of_other_calls_are_not_reported() {
    world(async |w| {
        let client = able(w, &["PUBLISH_UNPUBLISH_VOLUME", "EXPAND_VOLUME"]).await;
        client.register_volume(NAMESPACE, "v", writer("v")).await.unwrap();
        let given = || Some(secrets(&[("password", "c4n4ry-4242")]));
        // A claim of a cluster's attached volume brings no secrets. So the plugin has them from a mount of this host.
        let of_claim = given().filter(|_| !clustered::is_used());
        let options = ClaimOptions { secrets: of_claim, ..ClaimOptions::default() };
        client.claim(NAMESPACE, "v", "one", options).await.unwrap();
        if clustered::is_used() {
            let options = MountOptions { secrets: given(), ..MountOptions::default() };
            client.mount(NAMESPACE, "v", "one", options).await.unwrap();
        }
        let words = Act::Say(9, "no login with c4n4ry-4242".to_owned());
        w.plugin("p").rules([Rule::always("ControllerExpandVolume", words)]);
        for secrets in [None, given()] {
            let is_given = secrets.is_some();
            let options = ExpandOptions { secrets, ..ExpandOptions::default() };
            let (_, error) = refusal(client.expand_volume(NAMESPACE, "v", 8 << 20, 0, options).await);
            assert!(!format!("{error:?}").contains("c4n4ry"), "given {is_given}: {error:?}");
        }
        let options = ReleaseOptions { secrets: given(), ..ReleaseOptions::default() };
        client.release(NAMESPACE, "v", "one", options).await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn co_rule_23_staged_is_not_detached_without_plugin() {
    alone(UNREGISTERED, async |w| {
        let client = attaching(w).await;
        let options = AttachOptions {
            plugin: Some("p".to_owned()),
            external_id: Some("v".to_owned()),
            capabilities: Some(capabilities(&[AccessMode::SingleNodeWriter])),
            ..AttachOptions::default()
        };
        let context = client.attach_volume(NAMESPACE, "v", "node-1", options).await.unwrap();
        let attached = MountOptions { publish_context: Some(context), ..inline("v") };
        mount(&client, "job", attached).await.unwrap();
        w.kill();
        w.plugin("p").kill();
        let client = w.start().await;
        let detach = |client: Client| async move {
            client.detach_volume(NAMESPACE, "v", "node-1", Default::default()).await
        };
        // The journal knows under which node ID the volume is staged.
        let (kind, error) = refusal(detach(client.clone()).await);
        assert_eq!((kind, error.details.holders), (Kind::Busy, vec!["job".to_owned()]));
        w.plugin("p").start().await;
        healthy(&client, "p").await;
        assert_eq!(refusal(detach(client.clone()).await).0, Kind::Busy);
        assert_eq!(w.plugin("p").count("ControllerUnpublishVolume", "v"), 0);
        unmount(&client, "v", "job").await.unwrap();
        detach(client.clone()).await.unwrap();
        w.nothing_left(&client).await;
    });
}

/// Calls take turns: csid does not deregister a volume during a call that uses it.
#[test]
fn deregister_waits_for_the_claim_under_way() {
    alone("servers drop no claim for the end of a registration", async |w| {
        let client = attaching(w).await;
        client.register_volume(NAMESPACE, "v", writer("v")).await.unwrap();
        let claims_slowly = |w: &mut World| {
            w.plugin("p").rules([Rule::once("ControllerPublishVolume", Act::Delay(1500))]);
            let client = client.clone();
            tokio::spawn(async move { claim(&client, "v", "one").await.map(drop) })
        };
        let is_begun = async |w: &mut World, number| {
            let begun = async || w.plugin("p").begun_since(0, "ControllerPublishVolume") == number;
            eventually("it is being attached", begun).await;
        };
        let call = claims_slowly(w);
        is_begun(w, 1).await;
        let deregister = |force| {
            let options = DeregisterOptions { force: Some(force), ..DeregisterOptions::default() };
            client.deregister_volume(NAMESPACE, "v", options)
        };
        let (kind, error) = refusal(deregister(false).await);
        assert_eq!((kind, error.details.holders), (Kind::Busy, vec!["one".to_owned()]));
        call.await.unwrap().expect("the claim");
        release(&client, "v", "one").await.unwrap();

        let call = claims_slowly(w);
        is_begun(w, 2).await;
        let waiting = {
            let client = client.clone();
            let options = ClaimOptions { wait_usec: Some(60_000_000), ..ClaimOptions::default() };
            tokio::spawn(async move { client.claim(NAMESPACE, "v", "two", options).await })
        };
        eventually("it waits", async || client.list_operations().await.unwrap().len() == 2).await;
        deregister(true).await.unwrap();
        call.await.unwrap().expect("the claim, which is forgotten after it");
        assert_eq!(refusal(waiting.await.unwrap()).0, Kind::NotFound, "the waiting caller gets an error");
        assert_eq!(claimed(&client).await, []);
        // What force leaves attached is detached by its id.
        let inline = DetachOptions {
            plugin: Some("p".to_owned()),
            external_id: Some("v".to_owned()),
            ..DetachOptions::default()
        };
        client.detach_volume(NAMESPACE, "v", "node-1", inline).await.unwrap();
        w.nothing_left(&client).await;
    });
}

/// A registration that changes between a claim's check and its first step is the claim's error.
#[test]
fn claim_checks_a_changed_registration_again() {
    world(async |w| {
        let fault = Fault::of(w);
        let client = unattaching(w).await;
        client.register_volume(NAMESPACE, "v", writer("v")).await.unwrap();
        let claims_slowly = || {
            fault.arm("claim.held");
            let client = client.clone();
            tokio::spawn(async move { claim(&client, "v", "one").await.map(drop) })
        };
        let call = claims_slowly();
        fault.reached("claim").await;
        let capabilities = Some(capabilities(&[AccessMode::SingleNodeReaderOnly]));
        let changed = RegisterVolume { capabilities, ..writer("v") };
        client.register_volume(NAMESPACE, "v", changed).await.unwrap();
        fault.disarm();
        assert_eq!(refusal(call.await.unwrap()).0, Kind::InvalidArgument);

        let call = claims_slowly();
        fault.reached("claim").await;
        client.deregister_volume(NAMESPACE, "v", DeregisterOptions::default()).await.unwrap();
        fault.disarm();
        assert_eq!(refusal(call.await.unwrap()).0, Kind::NotFound);
        assert_eq!(claimed(&client).await, []);
        w.nothing_left(&client).await;
    });
}

/// Repeats a call while a claim that has ended is in its way: servers answer before they have the volume detached.
async fn not_claimed<T, F: Future<Output = Result<T>>>(call: impl Fn() -> F) -> Result<T> {
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        let answer = call().await;
        let is_claimed = matches!(&answer, Err(Error::Csid(error)) if error.kind == Kind::ClaimConflict);
        if !is_claimed || !clustered::is_used() || Instant::now() > end {
            return answer;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[test]
fn attach_without_its_secrets_is_not_begun() {
    world(async |w| {
        let client = attaching(w).await;
        let path = w.path("credentials/csid.default.v");
        let there = |path: &std::path::Path| std::fs::write(path, r#"{"password":"x"}"#).unwrap();
        there(&path);
        let credential = Some("csid.default.v".to_owned());
        let spec = RegisterVolume { credential, ..writer("v") };
        client.register_volume(NAMESPACE, "v", spec).await.unwrap();
        std::fs::remove_file(&path).unwrap();
        let attach = || client.attach_volume(NAMESPACE, "v", "node-2", AttachOptions::default());
        assert_eq!(refusal(attach().await).0, Kind::SecretRequired);
        assert_eq!(w.plugin("p").count("ControllerPublishVolume", "v"), 0);
        there(&path);
        claim(&client, "v", "one").await.expect("nothing is in its way");
        release(&client, "v", "one").await.unwrap();

        // What cannot be detached for want of them is known to rest, and ends when they are there.
        not_claimed(attach).await.unwrap();
        std::fs::remove_file(&path).unwrap();
        let detach = || client.detach_volume(NAMESPACE, "v", "node-2", Default::default());
        assert_eq!(refusal(detach().await).0, Kind::SecretRequired);
        there(&path);
        detach().await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn co_rule_33_deregistered_is_detached_with_secrets() {
    alone(UNREGISTERED, async |w| {
        let client = attaching(w).await;
        std::fs::write(w.path("credentials/csid.default.v"), r#"{"password":"x"}"#).unwrap();
        let credential = Some("csid.default.v".to_owned());
        client.register_volume(NAMESPACE, "v", RegisterVolume { credential, ..writer("v") }).await.unwrap();
        client.attach_volume(NAMESPACE, "v", "node-2", Default::default()).await.unwrap();
        client.deregister_volume(NAMESPACE, "v", Default::default()).await.unwrap();
        w.kill();
        let client = w.start().await;
        healthy(&client, "p").await;
        client.detach_volume(NAMESPACE, "v", "node-2", Default::default()).await.unwrap();
        let calls = w.plugin("p").volume_calls();
        let detach = calls.into_iter().find(|call| call.call.rpc == "ControllerUnpublishVolume").unwrap();
        assert_eq!(detach.call.secrets, [("password".to_owned(), "x".to_owned())]);
        w.nothing_left(&client).await;
    });
}

#[test]
fn plugin_with_attachments_is_not_unregistered() {
    alone("servers have what AttachVolume has attached, and a node has none of it", async |w| {
        let fault = Fault::of(w);
        let client = attaching(w).await;
        let spec = PluginSpec {
            supervision: Some(Supervision::External),
            socket: Some(w.plugin("p").witnessed_socket().to_string_lossy().into_owned()),
            ..PluginSpec::default()
        };
        client.register_plugin("q", spec).await.unwrap();
        healthy(&client, "q").await;
        let of_q = RegisterVolume { plugin: Some("q".to_owned()), ..writer("v") };
        client.register_volume(NAMESPACE, "v", of_q).await.unwrap();
        let unregister = || client.unregister_plugin("q", UnregisterOptions::default());
        client.attach_volume(NAMESPACE, "v", "node-2", AttachOptions::default()).await.unwrap();
        let (kind, error) = refusal(unregister().await);
        assert_eq!(kind, Kind::Busy, "{error}");
        client.detach_volume(NAMESPACE, "v", "node-2", Default::default()).await.unwrap();

        // Its row is still to come.
        fault.arm("claim.held");
        let call = {
            let client = client.clone();
            tokio::spawn(async move { claim(&client, "v", "one").await.map(drop) })
        };
        fault.reached("claim").await;
        let (kind, error) = refusal(unregister().await);
        assert_eq!(kind, Kind::Busy, "{error}");
        fault.disarm();
        call.await.unwrap().unwrap();
        assert_eq!(refusal(unregister().await).0, Kind::Busy);
        release(&client, "v", "one").await.unwrap();
        unregister().await.unwrap();
        w.nothing_left(&client).await;
    });
}

/// The witness holds a repeated RPC against csid unless the plugin was asked for its capabilities in between.
#[test]
fn unimplemented_attach_asks_what_the_plugin_can() {
    world(async |w| {
        let client = attaching(w).await;
        registered(&client, "v", &[AccessMode::SingleNodeWriter]).await;
        w.plugin("p").rules([Rule::always("ControllerPublishVolume", Act::Fail(12))]);
        for _ in 0..2 {
            let (kind, error) = refusal(claim(&client, "v", "one").await);
            assert!(kind == Kind::PluginError && error.message.contains("UNIMPLEMENTED"), "{error}");
        }
        let writer =
            || AttachOptions { access_mode: Some(AccessMode::SingleNodeWriter), ..AttachOptions::default() };
        let attach = || client.attach_volume(NAMESPACE, "v", "node-2", writer());
        for _ in 0..2 {
            let (kind, error) = refusal(not_claimed(attach).await);
            assert!(kind == Kind::PluginError && error.message.contains("UNIMPLEMENTED"), "{error}");
        }
        assert!(w.plugin("p").count("ControllerPublishVolume", "v") >= 2, "it was asked again");
        w.honest();
        claim(&client, "v", "one").await.unwrap();
        release(&client, "v", "one").await.unwrap();
        w.nothing_left(&client).await;
    });
}

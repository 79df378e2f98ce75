//! The calls of root on the host `n1`, and those of an operator.

use csi_proto::cluster::v1::change_ask::What;
use csi_proto::cluster::v1::{
    Capability, ChangeAsk, CreateAsk, DeleteAsk, DeleteSnapshotAsk, ExpandAsk, InventoryAsk, ListExternal,
    MeasureCapacity, SnapshotAsk, Spec, ValidateAsk, VolumeAsk, inventory_ask,
};
use csid_client::{
    AccessMode, AttachOptions, ClaimOptions, Client, CreateVolume, DetachOptions, ExpandOptions,
    MountOptions, ReleaseOptions, SealedSecrets, SnapshotOptions, UnmountOptions, ValidateOptions,
    VolumeOptions,
};
use csid_tests::ask::*;

use crate::canary::{ABSENT, BYTES, CREATED, CREDENTIAL, OPERATED, OTHER, REGISTERED, SECRET};
use crate::site::{Refusal, Site};

fn given() -> Option<SealedSecrets> {
    Some(secrets(&[("password", SECRET)]))
}

/// Makes one call. `deadline_usec`: how long it may take.
pub async fn ask(client: &Client, what: &str, deadline_usec: Option<u64>) -> csid_client::Result<()> {
    let (space, v) = (NAMESPACE, CREATED);
    let spec = || CreateVolume {
        plugin: Some("p".to_owned()),
        capabilities: Some(capabilities(&[AccessMode::SingleNodeWriter])),
        capacity_min: Some(BYTES),
        deadline_usec,
        ..CreateVolume::default()
    };
    let volume = || VolumeOptions { deadline_usec, ..VolumeOptions::default() };
    let attach = || AttachOptions { deadline_usec, ..AttachOptions::default() };
    let mount = || MountOptions { deadline_usec, ..MountOptions::default() };
    let claim = || ClaimOptions { deadline_usec, ..ClaimOptions::default() };
    let expand = ExpandOptions { deadline_usec, ..ExpandOptions::default() };
    let unmount = async |volume: &str| {
        let options = UnmountOptions { deadline_usec, ..UnmountOptions::default() };
        client.unmount(space, volume, "web", options).await
    };
    match what {
        "create" => {
            let spec = CreateVolume { credential: Some(CREDENTIAL.to_owned()), ..spec() };
            client.create_volume(space, v, spec).await.map(drop)
        }
        "create with secrets" => {
            client.create_volume(space, v, CreateVolume { secrets: given(), ..spec() }).await.map(drop)
        }
        "validate" => {
            let options = ValidateOptions { deadline_usec, ..ValidateOptions::default() };
            client.validate_volume(space, v, options).await.map(drop)
        }
        "attach" => client.attach_volume(space, v, OTHER, attach()).await.map(drop),
        "attach with secrets" => {
            let options = AttachOptions { secrets: given(), ..attach() };
            client.attach_volume(space, v, OTHER, options).await.map(drop)
        }
        "detach" => {
            let options = DetachOptions { deadline_usec, ..DetachOptions::default() };
            client.detach_volume(space, v, OTHER, options).await
        }
        "mount" => client.mount(space, v, "web", mount()).await.map(drop),
        "unmount" => unmount(v).await,
        "expand" => client.expand_volume(space, v, 2 * BYTES, 0, expand).await.map(drop),
        "expand more" => client.expand_volume(space, v, 3 * BYTES, 0, expand).await.map(drop),
        "snapshot" => {
            let options = SnapshotOptions { deadline_usec, ..SnapshotOptions::default() };
            client.create_snapshot(space, v, "monday", options).await.map(drop)
        }
        "delete" => client.delete_volume(space, v, volume()).await,
        "claim" => {
            let options = ClaimOptions { credential: Some(CREDENTIAL.to_owned()), ..claim() };
            client.claim(space, REGISTERED, "web", options).await.map(drop)
        }
        "claim with secrets" => {
            let options = ClaimOptions { secrets: given(), ..claim() };
            client.claim(space, REGISTERED, "web", options).await.map(drop)
        }
        "claim with a credential of this host" => {
            let options = ClaimOptions { credential: Some("of-this-host".to_owned()), ..claim() };
            client.claim(space, REGISTERED, "web", options).await.map(drop)
        }
        "release" => {
            let options = ReleaseOptions { deadline_usec, ..ReleaseOptions::default() };
            client.release(space, REGISTERED, "web", options).await
        }
        "mount with secrets" => {
            let options = MountOptions { secrets: given(), ..mount() };
            client.mount(space, REGISTERED, "web", options).await.map(drop)
        }
        "unmount registered" => unmount(REGISTERED).await,
        "ask for an absent volume" => client.volume(space, ABSENT).await.map(drop),
        what => panic!("{what}"),
    }
}

/// An operator, and what its calls were answered.
pub struct Operator<'a> {
    site: &'a Site,
    pub said: String,
    /// The plugin's ID of the last snapshot.
    snapshot: String,
    /// How often it has asked. A call has a name of its own, or else the answer of the call before.
    asked: u32,
}

impl Operator<'_> {
    pub fn new(site: &Site) -> Operator<'_> {
        Operator { site, said: String::new(), snapshot: String::new(), asked: 0 }
    }

    /// Makes one call. Returns whether it was done.
    pub async fn ask(&mut self, what: &str) -> bool {
        let mut client = self.site.operator(0, "all");
        self.asked += 1;
        let call = format!("call {}", self.asked);
        let (volume, plugin) = (OPERATED.to_owned(), "p".to_owned());
        let capability =
            || Capability { access_mode: "single-node-writer".into(), attachment_mode: "file-system".into() };
        let spec = || {
            let (capabilities, credential) = (vec![capability()], CREDENTIAL.to_owned());
            Some(Spec { capabilities, credential, ..Spec::default() })
        };
        let list =
            |snapshots| inventory_ask::What::List(ListExternal { snapshots, ..ListExternal::default() });
        let inventory = match what {
            "list volumes" => Some(list(false)),
            "list snapshots" => Some(list(true)),
            "measure" => {
                let measure =
                    MeasureCapacity { capabilities: vec![capability()], ..MeasureCapacity::default() };
                Some(inventory_ask::What::Capacity(measure))
            }
            _ => None,
        };
        let answer = match inventory {
            Some(what) => {
                let answer = client.inventory(InventoryAsk { plugin, what: Some(what) }).await;
                answer.map(|page| format!("{page:?}"))
            }
            None => {
                let what = match what {
                    "create" => {
                        let capacity_min = BYTES;
                        What::Create(CreateAsk {
                            volume,
                            plugin,
                            spec: spec(),
                            capacity_min,
                            ..CreateAsk::default()
                        })
                    }
                    "validate" => What::Validate(ValidateAsk { volume, ..ValidateAsk::default() }),
                    "expand" => {
                        What::Expand(ExpandAsk { volume, required: 2 * BYTES, ..ExpandAsk::default() })
                    }
                    "snapshot" => What::Snapshot(SnapshotAsk {
                        volume,
                        name: "tuesday".into(),
                        call,
                        ..SnapshotAsk::default()
                    }),
                    "delete the snapshot" => What::DeleteSnapshot(DeleteSnapshotAsk {
                        plugin,
                        snapshot: self.snapshot.clone(),
                        call,
                    }),
                    "delete" => What::Delete(DeleteAsk { volume, ..DeleteAsk::default() }),
                    what => panic!("{what}"),
                };
                let answer = client.change(ChangeAsk { what: Some(what) }).await;
                if let Ok(row) = &answer
                    && let Some(snapshot) = &row.get_ref().snapshot
                {
                    self.snapshot.clone_from(&snapshot.id);
                }
                answer.map(|row| format!("{row:?}"))
            }
        };
        let is_done = answer.is_ok();
        let said = answer.unwrap_or_else(|status| format!("{status:?} {:?}", Refusal::of(&status)));
        let ask = VolumeAsk { volume: OPERATED.into(), ..VolumeAsk::default() };
        let explained = client.explain(ask).await;
        self.said += &format!("{what}: {said}\n{explained:?}\n");
        is_done
    }
}

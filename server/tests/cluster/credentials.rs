//! Names of credentials: a caller names those of its namespaces alone.

use csi_proto::cluster::v1::{ChangeAsk, change_ask};
use tonic::Code;

use crate::site::{Refusal, Site, register};

fn with_credential(volume: &str, credential: &str) -> ChangeAsk {
    let mut ask = register(volume, "single-node-writer");
    if let Some(change_ask::What::Register(register)) = &mut ask.what {
        register.namespace = "a".into();
        register.spec.get_or_insert_default().credential = credential.into();
    }
    ask
}

#[tokio::test]
async fn credential_of_another_namespace_is_refused() {
    let site = Site::start(1).await;
    let mut of_a = site.operator(0, "registers");
    for credential in ["csid.prod.db", "csid.a.b.key", "root-password"] {
        let refused = of_a.change(with_credential("v", credential)).await.unwrap_err();
        assert_eq!(Refusal::of(&refused).code, Code::InvalidArgument, "{credential}: {refused:?}");
    }
    of_a.change(with_credential("v", "csid.a.key")).await.unwrap();
    // Not even a caller with all grants: a host's secrets are of the host.
    let refused = site.operator(0, "all").change(with_credential("w", "csid.prod.db")).await.unwrap_err();
    assert_eq!(Refusal::of(&refused).code, Code::InvalidArgument);
}

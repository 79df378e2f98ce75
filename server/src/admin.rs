//! The calls of operators about nodes and servers. Each finds out who calls, and makes one call inward.

use csi_proto::cluster::v1::admin_server::Admin;
use csi_proto::cluster::v1::node_change::Change;
use csi_proto::cluster::v1::{
    AuditAsk, ClusterStatus, Finding, NodeAsk, NodeChange, NodePage, NodeRow, NodesAsk, RestoredAsk,
    ResumeAsk, ServerRows, ServersAsk, StatusAsk, UpgradeAsk,
};
use csi_proto::identity::Identity;
use tonic::{Request, Response, Status};

use crate::edges::Edge;
use crate::failure::{Result, ServerError};
use crate::fence::LeftAttached;
use crate::grants::May;
use crate::places::Kept;
use crate::rows::Mode;
use crate::service::{Service, answered};
use crate::stream::{self, Answers};

#[tonic::async_trait]
impl Admin for Service {
    type NodesStream = Answers<NodePage>;
    type AuditStream = Answers<Finding>;

    async fn nodes(&self, request: Request<NodesAsk>) -> Result<Response<Self::NodesStream>, Status> {
        let caller = self.cluster.caller(&request)?;
        self.cluster.require_operator(&caller, May::Read)?;
        let place = self.places.enter(&caller, Kept::List)?;
        let mut list = self.cluster.list_nodes(request.into_inner().after).await?;
        let cluster = self.cluster.clone();
        let (mut sender, answers) = stream::open(1);
        tokio::spawn(async move {
            let _place = place;
            loop {
                let page = match cluster.next_nodes(&mut list).await {
                    Ok(Some(page)) => Ok(page),
                    Ok(None) => return,
                    Err(error) => Err(error.into()),
                };
                let is_last = page.is_err();
                if !sender.send(page).await || is_last {
                    return;
                }
            }
        });
        Ok(Response::new(answers))
    }

    async fn node(&self, request: Request<NodeAsk>) -> Result<Response<NodeRow>, Status> {
        let caller = self.cluster.caller(&request)?;
        self.cluster.require_operator(&caller, May::Read)?;
        Ok(Response::new(self.cluster.show_node(&request.into_inner().node).await?))
    }

    async fn set_node(&self, request: Request<NodeChange>) -> Result<Response<NodeRow>, Status> {
        let caller = self.cluster.caller(&request)?;
        answered(Edge::AnswerSetNode, self.change_node(&caller, request.into_inner())).await
    }

    async fn servers(&self, request: Request<ServersAsk>) -> Result<Response<ServerRows>, Status> {
        let caller = self.cluster.caller(&request)?;
        self.cluster.require_operator(&caller, May::Read)?;
        Ok(Response::new(self.cluster.list_servers().await?))
    }

    async fn upgrade(&self, request: Request<UpgradeAsk>) -> Result<Response<ServerRows>, Status> {
        let caller = self.cluster.caller(&request)?;
        Ok(Response::new(self.cluster.upgrade(&caller, request.into_inner()).await?))
    }

    async fn status(&self, request: Request<StatusAsk>) -> Result<Response<ClusterStatus>, Status> {
        let caller = self.cluster.caller(&request)?;
        self.cluster.require_operator(&caller, May::Read)?;
        let _place = self.places.enter(&caller, Kept::List)?;
        Ok(Response::new(self.cluster.status().await?))
    }

    async fn restored(&self, request: Request<RestoredAsk>) -> Result<Response<ServerRows>, Status> {
        let caller = self.cluster.caller(&request)?;
        let restored = async {
            self.cluster.restored(&caller, &request.into_inner()).await?;
            self.cluster.list_servers().await.map_err(ServerError::after_a_write)
        };
        answered(Edge::AnswerRestored, restored).await
    }

    async fn resume(&self, request: Request<ResumeAsk>) -> Result<Response<ServerRows>, Status> {
        let caller = self.cluster.caller(&request)?;
        let ask = request.into_inner();
        let resumed = async {
            self.cluster.resume(&caller, &ask).await?;
            if !ask.node.is_empty() {
                self.end_if_over(&ask.node).await;
            }
            self.cluster.list_servers().await.map_err(ServerError::after_a_write)
        };
        answered(Edge::AnswerResume, resumed).await
    }

    async fn audit(&self, request: Request<AuditAsk>) -> Result<Response<Self::AuditStream>, Status> {
        let caller = self.cluster.caller(&request)?;
        self.cluster.require_operator(&caller, May::Read)?;
        let place = self.places.enter(&caller, Kept::Audit)?;
        let cluster = self.cluster.clone();
        let (mut sender, findings) = stream::open(16);
        tokio::spawn(async move {
            let _place = place;
            let found = tokio::select! {
                found = cluster.audit() => found,
                () = sender.closed() => return,
            };
            let answers = match found {
                Ok(findings) => findings.into_iter().map(Ok).collect(),
                Err(error) => vec![Err(error.into())],
            };
            for answer in answers {
                if !sender.send(answer).await {
                    return;
                }
            }
        });
        Ok(Response::new(findings))
    }
}

impl Service {
    /// Makes an operator's change of a node.
    async fn change_node(&self, caller: &Identity, ask: NodeChange) -> Result<NodeRow> {
        let node = ask.node.clone();
        let is_fence = matches!(ask.change, Some(Change::Fence(_)));
        let is_over = is_fence || matches!(ask.change, Some(Change::Block(_)));
        let is_forgotten = matches!(ask.change, Some(Change::Forget(_)));
        self.cluster.set_node(caller, ask).await?;
        if is_over {
            self.end_if_over(&node).await;
        }
        let row = async {
            // The claims end when the cluster is normal.
            let left = match is_fence && self.cluster.meta_now().await?.value.mode == Mode::Normal {
                true => self.cluster.end_fenced(caller, &node).await?,
                false => LeftAttached::default(),
            };
            match is_forgotten {
                true => Ok(NodeRow { node: node.clone(), ..NodeRow::default() }),
                false => {
                    let row = self.cluster.show_node(&node).await?;
                    Ok(NodeRow { left: left.first, left_count: left.count, ..row })
                }
            }
        };
        row.await.map_err(ServerError::after_a_write)
    }
}

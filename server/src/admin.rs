//! The calls of operators about nodes and servers. Each finds out who calls, and makes one call inward.

use csi_proto::cluster::v1::admin_server::Admin;
use csi_proto::cluster::v1::node_change::Change;
use csi_proto::cluster::v1::{
    AuditAsk, Finding, NodeAsk, NodeChange, NodePage, NodeRow, NodesAsk, ServerRows, ServersAsk,
};
use csid::{Error, Kind};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use crate::failure::{Result, ServerError};
use crate::grants::May;
use crate::service::{Answers, READER, Service, place};

#[tonic::async_trait]
impl Admin for Service {
    type NodesStream = Answers<NodePage>;
    type AuditStream = Answers<Finding>;

    async fn nodes(&self, request: Request<NodesAsk>) -> Result<Response<Self::NodesStream>, Status> {
        let caller = self.cluster.caller(&request)?;
        self.cluster.require_operator(&caller, May::Read)?;
        let place = place(&self.operators_lists)?;
        let mut list = self.cluster.list_nodes(request.into_inner().after).await?;
        let cluster = self.cluster.clone();
        let (sender, receiver) = mpsc::channel(1);
        tokio::spawn(async move {
            let _place = place;
            loop {
                let page = match cluster.next_nodes(&mut list).await {
                    Ok(Some(page)) => Ok(page),
                    Ok(None) => return,
                    Err(error) => Err(error.into()),
                };
                let is_last = page.is_err();
                if sender.send_timeout(page, READER).await.is_err() || is_last {
                    return;
                }
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    async fn node(&self, request: Request<NodeAsk>) -> Result<Response<NodeRow>, Status> {
        let caller = self.cluster.caller(&request)?;
        self.cluster.require_operator(&caller, May::Read)?;
        Ok(Response::new(self.cluster.show_node(&request.into_inner().node).await?))
    }

    async fn set_node(&self, request: Request<NodeChange>) -> Result<Response<NodeRow>, Status> {
        let caller = self.cluster.caller(&request)?;
        let ask = request.into_inner();
        let node = ask.node.clone();
        let is_fence = matches!(ask.change, Some(Change::Fence(_)));
        let is_over = is_fence || matches!(ask.change, Some(Change::Block(_)));
        let is_forgotten = matches!(ask.change, Some(Change::Forget(_)));
        self.cluster.set_node(&caller, ask).await?;
        if is_over {
            self.end_if_over(&node).await;
        }
        if is_fence {
            self.cluster.end_fenced(&caller, &node).await?;
        }
        match is_forgotten {
            true => Ok(Response::new(NodeRow { node, ..NodeRow::default() })),
            false => Ok(Response::new(self.cluster.changed_node(&node).await?)),
        }
    }

    async fn servers(&self, request: Request<ServersAsk>) -> Result<Response<ServerRows>, Status> {
        let caller = self.cluster.caller(&request)?;
        self.cluster.require_operator(&caller, May::Read)?;
        Ok(Response::new(self.cluster.list_servers().await?))
    }

    async fn audit(&self, request: Request<AuditAsk>) -> Result<Response<Self::AuditStream>, Status> {
        let caller = self.cluster.caller(&request)?;
        self.cluster.require_operator(&caller, May::Read)?;
        // One walk over etcd at a time.
        let alone = self.audits.clone().try_acquire_owned();
        let busy =
            |_| ServerError::from(Error::new(Kind::RateLimited, "this server makes another audit now"));
        let alone = alone.map_err(busy)?;
        let cluster = self.cluster.clone();
        let (sender, receiver) = mpsc::channel(16);
        tokio::spawn(async move {
            let _alone = alone;
            let findings = tokio::select! {
                found = cluster.audit() => found,
                () = sender.closed() => return,
            };
            let answers = match findings {
                Ok(findings) => findings.into_iter().map(Ok).collect(),
                Err(error) => vec![Err(error.into())],
            };
            for answer in answers {
                if sender.send_timeout(answer, READER).await.is_err() {
                    return;
                }
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }
}

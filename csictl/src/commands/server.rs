//! The commands about a cluster's servers.

use csi_proto::cluster::v1::ServersAsk;
use csi_proto::cluster::v1::admin_client::AdminClient;

use crate::{
    args::Server,
    hints::Tried,
    operator::Servers,
    output::{self, print, print_json},
};

pub async fn server(servers: &Servers, command: Server, json: bool, tried: &mut Tried) -> anyhow::Result<()> {
    match command {
        Server::List => {
            tried.command = "server list";
            let ask =
                async |channel| Ok(AdminClient::new(channel).servers(ServersAsk {}).await?.into_inner());
            let rows = servers.call(None, ask).await?;
            if json {
                print_json(&output::servers_json(&rows))?;
                return Ok(());
            }
            print(&output::servers(&rows))?;
            for note in output::notes_of_servers(&rows) {
                eprintln!("{note}");
            }
        }
    }
    Ok(())
}

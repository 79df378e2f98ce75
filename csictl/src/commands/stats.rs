//! Resource usage of plugins.

use std::{io::IsTerminal, time::Instant};

use csid_client::{Client, Kind};

use crate::{
    args::Top,
    output::{self, Used, print, print_json},
};

/// Moves to the upper left corner and clears the screen.
const CLEAR: &str = "\u{1b}[H\u{1b}[J";

pub async fn stats(client: &Client, plugin: &str, json: bool) -> anyhow::Result<()> {
    let stats = client.plugin_stats(plugin).await?;
    if json {
        print_json(&stats)?
    } else {
        print(&output::plugin_stats(&stats))?
    }
    Ok(())
}

pub async fn top(client: &Client, args: Top, json: bool) -> anyhow::Result<()> {
    let again = !args.once && !json && std::io::stdout().is_terminal();
    let mut before: Option<(Instant, Vec<Used>)> = None;
    loop {
        let (now, used) = (Instant::now(), used(client).await?);
        if json {
            print_json(&used)?;
        } else {
            let before = before.as_ref().map(|(at, used)| (now.duration_since(*at), used.as_slice()));
            let table = output::top(&used, before);
            print(&if again { format!("{CLEAR}{table}") } else { table })?;
        }
        if !again {
            return Ok(());
        }
        before = Some((now, used));
        tokio::time::sleep(args.interval).await;
    }
}

async fn used(client: &Client) -> csid_client::Result<Vec<Used>> {
    let mut used = Vec::new();
    for plugin in client.list_plugins().await? {
        match client.plugin_stats(&plugin.id).await {
            Ok(stats) => used.push(Used { plugin: plugin.id, state: plugin.state, stats }),
            // The plugin was unregistered meanwhile.
            Err(error) if error.csid().is_some_and(|error| error.kind == Kind::NotFound) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(used)
}

//! What plugins use.

use std::{io::IsTerminal, time::Instant};

use csid_client::{Client, Kind};

use crate::{
    args::Top,
    output::{self, Used, say, say_json},
};

/// To the upper left corner, and all behind it away.
const CLEAR: &str = "\u{1b}[H\u{1b}[J";

pub async fn stats(client: &Client, plugin: &str, json: bool) -> anyhow::Result<()> {
    let stats = client.plugin_stats(plugin).await?;
    if json {
        say_json(&stats)?
    } else {
        say(&output::plugin_stats(&stats))?
    }
    Ok(())
}

pub async fn top(client: &Client, args: Top, json: bool) -> anyhow::Result<()> {
    let again = !args.once && !json && std::io::stdout().is_terminal();
    let mut before: Option<(Instant, Vec<Used>)> = None;
    loop {
        let (now, used) = (Instant::now(), used(client).await?);
        if json {
            say_json(&used)?;
        } else {
            let before = before.as_ref().map(|(at, used)| (now.duration_since(*at), used.as_slice()));
            let table = output::top(&used, before);
            say(&if again { format!("{CLEAR}{table}") } else { table })?;
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
            // It was unregistered since.
            Err(error) if error.csid().is_some_and(|error| error.kind == Kind::NotFound) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(used)
}

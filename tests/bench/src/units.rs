//! A systemd for the bench: every unit that it is asked about runs.

use anyhow::Result;
use futures_util::StreamExt;
use tokio::task::JoinHandle;
use zbus::message::Type;
use zbus::{Connection, Message, MessageStream, OwnedObjectPath};

type Listed = (String, String, String, String, String, String, OwnedObjectPath, u32, String, OwnedObjectPath);

/// It answers until it is dropped.
pub struct Units(JoinHandle<()>);

impl Units {
    /// Starts it on the bus at `address`.
    pub async fn start(address: &str) -> Result<Self> {
        let connection = zbus::connection::Builder::address(address).build().await?;
        let mut messages = MessageStream::from(&connection);
        connection.request_name("org.freedesktop.systemd1").await?;
        Ok(Units(tokio::spawn(async move {
            while let Some(Ok(message)) = messages.next().await {
                if message.message_type() == Type::MethodCall {
                    let _ = answer(&connection, &message).await;
                }
            }
        })))
    }
}

impl Drop for Units {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn answer(connection: &Connection, call: &Message) -> zbus::Result<()> {
    let header = call.header();
    match header.member().map(|member| member.as_str()) {
        Some("Subscribe") => connection.reply(&header, &()).await,
        Some("ListUnitsByNames") => {
            let (names,): (Vec<String>,) = call.body().deserialize()?;
            let rows = names.into_iter().map(row).collect::<zbus::Result<Vec<Listed>>>()?;
            connection.reply(&header, &(rows,)).await
        }
        _ => connection.reply_error(&header, "org.freedesktop.systemd1.NoSuchUnit", &"there is none").await,
    }
}

fn row(name: String) -> zbus::Result<Listed> {
    let letter = |letter: char| match letter.is_ascii_alphanumeric() {
        true => letter.to_string(),
        false => format!("_{:02x}", u32::from(letter)),
    };
    let path = format!("/org/freedesktop/systemd1/unit/{}", name.chars().map(letter).collect::<String>());
    let [load, active, none] = ["loaded", "active", ""].map(str::to_owned);
    let (path, job) = (OwnedObjectPath::try_from(path)?, OwnedObjectPath::try_from("/".to_owned())?);
    Ok((name, none.clone(), load, active, none.clone(), none.clone(), path, 0, none, job))
}

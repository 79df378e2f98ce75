//! The messages of the volume plugin protocol, version 1, as Docker and Podman send them. Each request is a POST with a JSON body.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize};

/// The body of a request. Each path uses some of the fields. A field that a body lacks is empty.
#[derive(Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct Body {
    pub name: String,
    /// The engine's ID of the user. Only Mount and Unmount have it.
    #[serde(rename = "ID")]
    pub id: String,
    /// The options of a creation. Docker sends null if there are none.
    #[serde(deserialize_with = "null_is_empty")]
    pub opts: BTreeMap<String, String>,
}

fn null_is_empty<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeMap<String, String>, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

/// A request by its path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    Activate,
    Capabilities,
    Create,
    Remove,
    Get,
    List,
    Path,
    Mount,
    Unmount,
}

impl Request {
    /// Returns the request at a path. `None`: the protocol has none there.
    pub fn at(path: &str) -> Option<Request> {
        Some(match path {
            "/Plugin.Activate" => Request::Activate,
            "/VolumeDriver.Capabilities" => Request::Capabilities,
            "/VolumeDriver.Create" => Request::Create,
            "/VolumeDriver.Remove" => Request::Remove,
            "/VolumeDriver.Get" => Request::Get,
            "/VolumeDriver.List" => Request::List,
            "/VolumeDriver.Path" => Request::Path,
            "/VolumeDriver.Mount" => Request::Mount,
            "/VolumeDriver.Unmount" => Request::Unmount,
            _ => return None,
        })
    }

    /// Returns whether the body has to name a volume.
    pub fn needs_name(self) -> bool {
        !matches!(self, Request::Activate | Request::Capabilities | Request::List)
    }
}

/// A volume in the answer to Get or List.
#[derive(Debug, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct Volume {
    pub name: String,
    /// The path of the mount. Empty: the volume is not mounted.
    pub mountpoint: String,
    pub status: BTreeMap<&'static str, serde_json::Value>,
}

/// The answer of a request that succeeded. Fields that do not apply are absent.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct Answer {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub implements: Option<[&'static str; 1]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub capabilities: Option<Capabilities>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub volume: Option<Volume>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub volumes: Option<Vec<Volume>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mountpoint: Option<String>,
    /// The error. Empty: there is none.
    pub err: String,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct Capabilities {
    pub scope: &'static str,
}

impl Answer {
    pub fn activate() -> Self {
        Answer { implements: Some(["VolumeDriver"]), ..Answer::default() }
    }

    pub fn capabilities() -> Self {
        Answer { capabilities: Some(Capabilities { scope: "local" }), ..Answer::default() }
    }

    pub fn mountpoint(path: String) -> Self {
        Answer { mountpoint: Some(path), ..Answer::default() }
    }

    pub fn error(text: String) -> Self {
        Answer { err: text, ..Answer::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(text: &str) -> Body {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn recorded_bodies_of_both_engines_are_read() {
        let docker = body(r#"{"Name":"pg","Opts":null}"#);
        assert_eq!(docker, Body { name: "pg".to_owned(), ..Body::default() });
        let podman = body(r#"{"Name":"pg","Opts":{"o":"size=1G"}}"#);
        assert_eq!(podman.opts["o"], "size=1G");
        assert_eq!(body(r#"{"Name":"pg","ID":"b0b5"}"#).id, "b0b5");
        assert_eq!(body("{}"), Body::default());
    }

    #[test]
    fn answers_are_as_the_engines_expect() {
        let text = |answer: &Answer| serde_json::to_string(answer).unwrap();
        assert_eq!(text(&Answer::activate()), r#"{"Implements":["VolumeDriver"],"Err":""}"#);
        assert_eq!(text(&Answer::capabilities()), r#"{"Capabilities":{"Scope":"local"},"Err":""}"#);
        assert_eq!(text(&Answer::mountpoint("/m".to_owned())), r#"{"Mountpoint":"/m","Err":""}"#);
        assert_eq!(text(&Answer::error("no".to_owned())), r#"{"Err":"no"}"#);
        let list = Answer { volumes: Some(Vec::new()), ..Answer::default() };
        assert_eq!(text(&list), r#"{"Volumes":[],"Err":""}"#);
    }
}

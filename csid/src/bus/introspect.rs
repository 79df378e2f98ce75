//! Introspection: the contract's XML without the methods that are not served.

use std::collections::BTreeMap;
use std::fmt::Write;

use super::contract::{CLUSTER, INTROSPECTABLE, MANAGER, Method, OBJECT_MANAGER, PEER, PLUGIN, PROPERTIES};

const DOCTYPE: &str = "<!DOCTYPE node PUBLIC \"-//freedesktop//DTD D-BUS Object Introspection 1.0//EN\"\n \
                       \"http://www.freedesktop.org/standards/dbus/1.0/introspect.dtd\">\n";

/// The XML of each interface for an introspection document.
pub(super) struct Interfaces(BTreeMap<&'static str, String>);

impl Interfaces {
    /// Reads the contract. Only these methods of it appear.
    pub fn with(methods: &[&Method]) -> Self {
        let mut interfaces = BTreeMap::from([
            (PEER, PEER_XML.to_owned()),
            (INTROSPECTABLE, INTROSPECTABLE_XML.to_owned()),
            (PROPERTIES, PROPERTIES_XML.to_owned()),
            (OBJECT_MANAGER, OBJECT_MANAGER_XML.to_owned()),
        ]);
        let contract = without_comments(csi_proto::DBUS_INTERFACE_XML);
        for name in [MANAGER, CLUSTER, PLUGIN] {
            interfaces.insert(name, served(name, &contract, methods));
        }
        Interfaces(interfaces)
    }

    /// Returns the document of an object with these interfaces and children.
    pub fn document(&self, interfaces: &[&str], children: &[String]) -> String {
        let mut text = format!("{DOCTYPE}<node>\n");
        for interface in interfaces {
            text.push_str(self.0.get(interface).map_or("", String::as_str));
        }
        for child in children {
            // Writing to a String cannot fail; a child is letters, digits and `_`.
            let _ = writeln!(text, " <node name=\"{child}\"/>");
        }
        text.push_str("</node>\n");
        text
    }
}

fn without_comments(xml: &str) -> String {
    let mut text = String::with_capacity(xml.len());
    let mut rest = xml;
    while let Some((before, comment)) = rest.split_once("<!--") {
        text.push_str(before);
        rest = comment.split_once("-->").map_or("", |(_, after)| after);
    }
    text.push_str(rest);
    text
}

/// Returns an interface of the contract with its properties, its signals and those methods that are served.
fn served(interface: &str, contract: &str, methods: &[&Method]) -> String {
    let start = format!("<interface name=\"{interface}\">");
    let body = contract.split_once(&start).and_then(|(_, rest)| rest.split_once("</interface>"));
    let mut rest = body.map_or("", |(body, _)| body);
    let mut text = format!(" {start}\n");
    // The contract writes each member as one element; attributes hold no `<`.
    while let Some(place) = rest.find('<') {
        rest = &rest[place..];
        let tag = rest[1..].split([' ', '>', '/']).next().unwrap_or("");
        let close = format!("</{tag}>");
        let open = rest.find('>').map_or(rest.len(), |end| end + 1);
        let end = match rest[..open].ends_with("/>") {
            true => open,
            false => rest.find(&close).map_or(rest.len(), |end| end + close.len()),
        };
        let (element, after) = rest.split_at(end);
        let name = element.split("name=\"").nth(1).and_then(|text| text.split('"').next()).unwrap_or("");
        let is_served = methods.iter().any(|method| method.interface == interface && method.name == name);
        if tag != "method" || is_served {
            let _ = writeln!(text, "  {element}");
        }
        rest = after;
    }
    text.push_str(" </interface>\n");
    text
}

const PEER_XML: &str = r#" <interface name="org.freedesktop.DBus.Peer">
  <method name="Ping"/>
  <method name="GetMachineId"><arg name="machine_uuid" type="s" direction="out"/></method>
 </interface>
"#;

const INTROSPECTABLE_XML: &str = r#" <interface name="org.freedesktop.DBus.Introspectable">
  <method name="Introspect"><arg name="xml_data" type="s" direction="out"/></method>
 </interface>
"#;

const PROPERTIES_XML: &str = r#" <interface name="org.freedesktop.DBus.Properties">
  <method name="Get"><arg name="interface_name" type="s" direction="in"/><arg name="property_name" type="s" direction="in"/><arg name="value" type="v" direction="out"/></method>
  <method name="GetAll"><arg name="interface_name" type="s" direction="in"/><arg name="properties" type="a{sv}" direction="out"/></method>
  <method name="Set"><arg name="interface_name" type="s" direction="in"/><arg name="property_name" type="s" direction="in"/><arg name="value" type="v" direction="in"/></method>
  <signal name="PropertiesChanged"><arg name="interface_name" type="s"/><arg name="changed_properties" type="a{sv}"/><arg name="invalidated_properties" type="as"/></signal>
 </interface>
"#;

const OBJECT_MANAGER_XML: &str = r#" <interface name="org.freedesktop.DBus.ObjectManager">
  <method name="GetManagedObjects"><arg name="objects" type="a{oa{sa{sv}}}" direction="out"/></method>
  <signal name="InterfacesAdded"><arg name="object_path" type="o"/><arg name="interfaces_and_properties" type="a{sa{sv}}"/></signal>
  <signal name="InterfacesRemoved"><arg name="object_path" type="o"/><arg name="interfaces" type="as"/></signal>
 </interface>
"#;

//! The network of a site: each machine has a network namespace, which a veth joins to a bridge in the test's own. File descriptors of the test
//! keep the namespaces. Nothing is left of them, whatever ends the test.

use std::collections::BTreeMap;
use std::fs::File;
use std::net::Ipv4Addr;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use rustix::thread::{UnshareFlags, unshare_unsafe};

use crate::etcd::command;

const BRIDGE: &str = "bridge";
/// The interface of each machine.
const INTERFACE: &str = "eth0";

/// The packets that a cut takes from a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    Both,
    In,
    Out,
}

/// The machines of a test, and the bridge between them.
pub struct Network {
    /// The test's own namespace.
    own: File,
    machines: BTreeMap<String, Machine>,
}

struct Machine {
    address: Ipv4Addr,
    namespace: File,
}

impl Network {
    #[allow(clippy::new_without_default, reason = "it changes the thread")]
    /// Gives this thread, and what it starts from now on, a network of its own: loopback and the bridge.
    pub fn new() -> Network {
        let own = namespace();
        run("ip", &["link", "add", BRIDGE, "type", "bridge"]);
        run("ip", &["address", "add", &format!("{}/24", Network::own_address()), "dev", BRIDGE]);
        run("ip", &["link", "set", BRIDGE, "up"]);
        Network { own, machines: BTreeMap::new() }
    }

    /// Returns the address of the test's own network namespace, which each machine reaches.
    pub fn own_address() -> Ipv4Addr {
        address(254)
    }

    /// Adds a machine. Returns its address.
    pub fn add(&mut self, name: &str) -> Ipv4Addr {
        let address = address(u8::try_from(self.machines.len() + 1).expect("a small site"));
        let bridged = path(&self.own);
        let of = name.to_owned();
        // A namespace is a thread's: what this one starts runs in the machine's.
        let made = std::thread::spawn(move || {
            let namespace = namespace();
            let bridged = bridged.to_str().expect("a path");
            let veth = ["link", "add", INTERFACE, "type", "veth", "peer", "name", &of, "netns", bridged];
            run("ip", &veth);
            run("ip", &["address", "add", &format!("{address}/24"), "dev", INTERFACE]);
            run("ip", &["link", "set", INTERFACE, "up"]);
            namespace
        });
        let namespace = made.join().expect("a network namespace");
        run("ip", &["link", "set", "dev", name, "master", BRIDGE, "up"]);
        self.machines.insert(name.to_owned(), Machine { address, namespace });
        address
    }

    /// Returns the file of a machine's namespace.
    pub fn namespace(&self, name: &str) -> PathBuf {
        path(&self.machines[name].namespace)
    }

    /// Drops packets of machines for a time, also those of connections that the machines have opened. `others`: the machines that they do not
    /// reach. Empty: they reach no machine.
    pub async fn cut(&self, machines: &[String], others: &[String], way: Way, time: Duration) {
        self.begin_cut(machines, others, way);
        tokio::time::sleep(time).await;
        machines.iter().for_each(|name| self.heal(name));
    }

    /// Drops packets as [`Network::cut`] does, until each machine is healed.
    pub fn begin_cut(&self, machines: &[String], others: &[String], way: Way) {
        for name in machines {
            for (is_cut, chain, by, end) in [
                (way != Way::Out, "INPUT", "--in-interface", "--source"),
                (way != Way::In, "OUTPUT", "--out-interface", "--destination"),
            ] {
                let mut rule = vec!["--append", chain, by, INTERFACE, "--jump", "DROP"];
                let others: Vec<_> =
                    others.iter().map(|name| self.machines[name].address.to_string()).collect();
                let others = others.join(",");
                if !others.is_empty() {
                    rule.extend([end, &others]);
                }
                if is_cut {
                    self.iptables(name, &rule);
                }
            }
        }
    }

    /// Has the connections of a machine to others end as soon as the machine sends a packet, and has new ones refused.
    pub fn refuse(&self, machine: &str, others: &[String]) {
        let others: Vec<_> = others.iter().map(|name| self.machines[name].address.to_string()).collect();
        let rule = "--append OUTPUT --protocol tcp --jump REJECT --reject-with tcp-reset --destination";
        self.iptables(machine, &rule.split(' ').chain([others.join(",").as_str()]).collect::<Vec<_>>());
    }

    /// Ends what a machine's packets are kept from.
    pub fn heal(&self, machine: &str) {
        self.iptables(machine, &["--flush"]);
    }

    fn iptables(&self, machine: &str, arguments: &[&str]) {
        let mut iptables = command(Path::new("iptables"), Some(&self.namespace(machine)));
        success(iptables.arg("--wait").args(arguments));
    }
}

/// Returns the address of a machine. A server takes an etcd without TLS at addresses of 127.0.0.0/8 alone.
fn address(host: u8) -> Ipv4Addr {
    Ipv4Addr::new(127, 1, 0, host)
}

/// Gives this thread a network namespace of its own, with loopback alone, in which 127.0.0.0/8 is as any other network. Returns it.
fn namespace() -> File {
    // SAFETY: file descriptors stay shared. The thread is a test's own, and no other expects its network to be the process'.
    unsafe { unshare_unsafe(UnshareFlags::NEWNET) }.expect("a network namespace (the tests need root)");
    run("ip", &["link", "set", "lo", "up"]);
    run("ip", &["address", "delete", "127.0.0.1/8", "dev", "lo"]);
    run("ip", &["address", "add", "127.0.0.1/32", "dev", "lo"]);
    std::fs::write("/proc/sys/net/ipv4/conf/all/route_localnet", "1").expect("a setting of the namespace");
    File::open("/proc/thread-self/ns/net").expect("the thread's network namespace")
}

/// Returns the path of a file that this process has open, for other processes.
fn path(file: &File) -> PathBuf {
    PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()))
}

fn run(program: &str, arguments: &[&str]) {
    success(Command::new(program).args(arguments));
}

fn success(command: &mut Command) {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::os::fd::AsFd;

    use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

    use super::*;
    use crate::world::world;

    impl Network {
        /// Returns a socket on a machine.
        fn socket(&self, name: &str) -> UdpSocket {
            let Machine { address, namespace } = &self.machines[name];
            std::thread::scope(|threads| {
                let bind = || {
                    move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
                    let socket = UdpSocket::bind((*address, 1000)).unwrap();
                    socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
                    socket
                };
                threads.spawn(bind).join().unwrap()
            })
        }
    }

    /// Sends a text. Returns the first text that arrives: a later one shows that this one was lost.
    fn first(from: &UdpSocket, to: &UdpSocket, text: &str) -> String {
        from.send_to(text.as_bytes(), to.local_addr().unwrap()).unwrap_or_default();
        let mut buffer = [0; 16];
        let size = to.recv(&mut buffer).unwrap();
        String::from_utf8_lossy(&buffer[..size]).into_owned()
    }

    #[test]
    fn cut_takes_packets_of_one_machine_one_way() {
        world(async |_| {
            let mut network = Network::new();
            for name in ["a", "b", "c"] {
                network.add(name);
            }
            let [a, b] = ["a", "b"].map(|name| network.socket(name));
            for (others, way, is_sent, is_received) in [
                (&[][..], Way::Both, false, false),
                (&[], Way::In, true, false),
                (&[], Way::Out, false, true),
                (&["b".to_owned()], Way::Both, false, false),
                (&["b".to_owned(), "c".to_owned()], Way::In, true, false),
                (&["c".to_owned()], Way::Both, true, true),
            ] {
                let during = async {
                    for (from, to) in [(&a, &b), (&b, &a)] {
                        let _ = from.send_to(b"during", to.local_addr().unwrap());
                    }
                };
                let machines = ["a".to_owned()];
                tokio::join!(network.cut(&machines, others, way, Duration::from_millis(20)), during);
                let due = |arrives| if arrives { "during" } else { "after" };
                assert_eq!(first(&a, &b, "after"), due(is_sent), "{others:?} {way:?}");
                assert_eq!(first(&b, &a, "after"), due(is_received), "{others:?} {way:?}");
                for (socket, is_more) in [(&b, is_sent), (&a, is_received)] {
                    if is_more {
                        assert_eq!(socket.recv(&mut [0; 16]).unwrap(), "after".len());
                    }
                }
            }
        });
    }
}

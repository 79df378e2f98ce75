//! Others on the host: processes, and mount namespaces with many mounts.

use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_bind, mount_change};
use rustix::thread::UnshareFlags;

use crate::host::Running;

/// Starts these many others and waits until they are there. `directory` is theirs. They end with the handle.
pub fn start(directory: &Path, processes: usize, namespaces: usize, mounts: usize) -> Result<Running> {
    let ready = directory.join("ready");
    let _ = fs::remove_file(&ready);
    fs::create_dir_all(directory)?;
    let numbers = [processes, namespaces, mounts].map(|number| number.to_string());
    let mut command = Command::new(std::env::current_exe()?);
    let running = Running::start(command.arg("serve-neighbours").arg(directory).args(numbers))?;
    let end = std::time::Instant::now() + Duration::from_secs(60);
    while !ready.exists() {
        ensure!(std::time::Instant::now() < end, "the neighbours were not there in time");
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(running)
}

/// What [`start`] starts: it has the mounts, and a copy of them in each namespace.
pub fn serve(directory: &Path, processes: usize, namespaces: usize, mounts: usize) -> Result<()> {
    // SAFETY: this process has one thread; descriptors stay shared.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS) }?;
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
    let own = directory.join("mounts");
    fs::create_dir_all(&own)?;
    mount("tmpfs", &own, "tmpfs", MountFlags::empty(), None)?;
    for number in 0..mounts {
        let path = own.join(number.to_string());
        fs::create_dir(&path)?;
        mount_bind(&path, &path)?;
    }
    let apart = ["unshare", "--mount", "--propagation", "unchanged", "sleep", "3600"];
    let copies = (0..namespaces).map(|_| child(&apart)).collect::<Result<Vec<_>>>()?;
    let others = (0..processes).map(|_| child(&apart[4..])).collect::<Result<Vec<_>>>()?;
    for process in copies.iter().chain(&others) {
        let name = format!("/proc/{}/comm", process.id());
        while fs::read_to_string(&name).context("a neighbour ended")? != "sleep\n" {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    fs::write(directory.join("ready"), "")?;
    // Until it is killed, and with it all of them.
    std::io::stdin().read_to_end(&mut Vec::new())?;
    loop {
        std::thread::park();
    }
}

fn child(command: &[&str]) -> Result<Child> {
    let mut process = Command::new("setpriv");
    process.args(["--pdeathsig", "KILL"]).args(command).stdin(Stdio::null());
    process.spawn().context("cannot start a neighbour")
}

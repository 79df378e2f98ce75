//! umount.csi.

use std::{
    ffi::{OsStr, OsString},
    io,
};

use csid_client::{Descriptor, UnmountOptions, Via};
use rustix::{
    mount::{UnmountFlags, unmount as detach},
    process::geteuid,
};

use super::{
    arguments::UnmountArguments,
    failure::HelperFailure,
    options::DEADLINE,
    session::{Asking, mount_table, open_target},
    utab,
};

pub async fn unmount(words: Vec<OsString>) -> Result<(), HelperFailure> {
    let arguments = UnmountArguments::parse(words)?;
    if !geteuid().is_root() {
        return Err(HelperFailure::Usage("only root unmounts".to_owned()));
    }
    let done = of_csid(&arguments).await;
    if done.is_ok() {
        // umount(8) removes the last one.
        utab::keep(1, &arguments.target).await;
    }
    done
}

async fn of_csid(arguments: &UnmountArguments) -> Result<(), HelperFailure> {
    let target = &arguments.target;
    let mut asking = Asking::open("unmount", DEADLINE).await?;
    let Some(row) = asking.row(target).await? else {
        // A line of utab for a mount that is not csid's any more must block nothing.
        return by_kernel(target);
    };
    asking.about(&row.namespace, &row.volume, &row.consumer, &row.tag);
    let tag = (!row.tag.is_empty()).then(|| row.tag.clone());
    let force = arguments.force.then_some(true);
    let mut options = UnmountOptions { tag, force, ..UnmountOptions::default() };
    let mut is_off_target = false;
    let client = asking.session.client().await.map_err(|error| asking.failed(error))?;
    if mount_table()?.is_on_automount(OsStr::new(target)) && matches!(client.via(), Via::Socket(_)) {
        // csid would wait for the automount's daemon, which waits for this process.
        by_kernel(target)?;
        is_off_target = true;
        options.target_fd = Some(Descriptor::from(open_target(target)?));
        options.target = Some(target.clone());
    }
    let unmounted = asking.unmount((&row.namespace, &row.volume, &row.consumer), options).await;
    match unmounted {
        Err(failure) if arguments.lazy && failure.is_busy() => Err(HelperFailure::Failed(format!(
            "{}\ncsid detaches no mount in use. `umount -i -l {target}` detaches the directory alone; the volume stays in use.",
            failure.text()
        ))),
        Err(failure) if is_off_target => Err(HelperFailure::Failed(format!(
            "{}\nThe automount has taken {target} away already. csid keeps the volume until: csictl unmount {}",
            failure.text(),
            asking.tried.mount.as_deref().unwrap_or_default()
        ))),
        other => other,
    }
}

/// Unmounts what the kernel shows at the target.
fn by_kernel(target: &str) -> Result<(), HelperFailure> {
    detach(target, UnmountFlags::NOFOLLOW).map_err(|error| {
        HelperFailure::Failed(match io::Error::from(error).kind() {
            io::ErrorKind::InvalidInput | io::ErrorKind::NotFound => format!("{target} is not mounted"),
            _ => format!("cannot unmount {target}: {error}"),
        })
    })
}

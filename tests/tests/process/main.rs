//! csid as a process with test plugins: a caller's answer and what is there afterwards, also after csid was killed and
//! after a reboot.

mod adopting;
mod automount;
mod binds;
mod calls;
mod closed;
mod consumers;
mod descriptors;
mod doctor;
mod drains;
mod events;
mod fstab;
mod fstab_races;
mod healing;
mod hung;
mod idmapped;
mod instances;
mod kills;
mod life;
mod live;
mod metrics;
mod namespaces;
mod noticed;
mod opening;
mod podman;
mod progress;
mod races;
mod reboots;
mod registrations;
mod searches;
mod secrets;
mod slow;
mod stats;
mod targets;
mod unmounting;

//! csid as a process with test plugins: what a caller is told and what is there afterwards, also after csid was killed and
//! after a reboot.

mod calls;
mod closed;
mod consumers;
mod drains;
mod events;
mod healing;
mod instances;
mod life;
mod metrics;
mod noticed;
mod opening;
mod reboots;
mod registrations;
mod secrets;
mod stats;
mod targets;

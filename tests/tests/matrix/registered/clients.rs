//! Several clients at once who claim, wait, mount, unmount, release, attach, detach, expand, give up and cancel, while csid is
//! killed, stopped and started, and its plugin misbehaves and dies. From time to time all pause; then what is there is held
//! against what may be after these calls, in any order that their times leave open.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use csid_client::{Client, Target};
use csid_tests::dice::Dice;
use csid_tests::script::{Act, Rule};
use csid_tests::site::Site;
use futures_util::future::join_all;

use super::item::{self, Answer};
use super::way::{RPCS, misbehaviour};
use super::{Ask, BYTES, Item, Manner, Pool, REBOOTS, SECOND, Setting, Volume, after, items_of};
use crate::model::{Entry, Told, after_all};
use crate::plan::Plugin;
use crate::report::Report;
use crate::slots::POLL;

const CLIENTS: usize = 4;
/// Calls of a client between two pauses, at most.
const CALLS: u64 = 6;
const CELL: &str = "clients of registered volumes";

type What = (Ask, Told);

impl Pool<'_> {
    pub async fn clients(&mut self, epochs: usize) {
        for volume in 0..self.volumes.len() {
            self.register(volume).await;
        }
        for _ in 0..epochs {
            self.epoch().await;
        }
    }

    async fn epoch(&mut self) {
        // Few, so that they meet.
        let near = self.dice.below(self.volumes.len() as u64) as usize;
        let desk = Desk {
            socket: self.site.w.socket(),
            setting: self.setting,
            volumes: &self.volumes,
            items: &self.items,
            near: items_of(near),
            answers: RefCell::default(),
            report: &self.report,
        };
        let dice: Vec<_> = (0..CLIENTS).map(|_| Dice::new(self.dice.bits(), 0)).collect();
        let paused = Cell::new(false);
        let clients = async {
            join_all(dice.into_iter().map(|dice| desk.client(dice))).await;
            paused.set(true);
        };
        tokio::join!(clients, fate(&mut self.site, self.setting, &self.report, &paused, &mut self.dice));

        let answers = desk.answers.into_inner();
        for number in 0..self.items.len() {
            let of_item = answers.iter().filter(|(item, ..)| *item == number);
            let item = &mut self.items[number];
            item.history = of_item.map(|(.., entry)| entry.clone()).collect();
            item.allowed =
                after_all(item.state(), &item.history, |state, (ask, answer)| after(state, *ask, answer));
        }
        for (item, got, Entry { what: (ask, _), .. }) in &answers {
            self.got(*item, *ask, got);
        }
        self.site.w.honest();
        // csid may be dead, or about to die.
        loop {
            if self.site.w.dead() {
                self.report.kill(&self.site.fault.disarm(), CELL);
                assert!(self.site.w.launch(&[]).await, "csid ended without a fault");
            }
            match Client::connect(&Target::Socket(self.site.w.socket())).await {
                Ok(client) => break self.site.client = client,
                Err(_) => tokio::time::sleep(POLL).await,
            }
        }
        self.settle(CELL).await;
        if self.dice.once_in(REBOOTS) {
            self.reboot().await;
            assert!(self.site.w.launch(&[]).await, "csid ended without a fault");
            self.site.client = self.site.w.client().await;
            self.settle(CELL).await;
        }
    }
}

/// The connections of the clients.
struct Desk<'a> {
    socket: PathBuf,
    setting: Setting,
    volumes: &'a [Volume],
    items: &'a [Item],
    /// The items of the volume that most of them want.
    near: Range<usize>,
    answers: RefCell<Vec<(usize, item::Got, Entry<What>)>>,
    report: &'a Report,
}

impl Desk<'_> {
    /// Makes the calls of one caller, one after the other.
    async fn client(&self, mut dice: Dice) {
        let mut connection = None;
        let mut left = 1 + dice.below(CALLS);
        while left > 0 {
            let Some(client) = &connection else {
                tokio::time::sleep(POLL).await;
                connection = Client::connect(&Target::Socket(self.socket.clone())).await.ok();
                continue;
            };
            left -= 1;
            let number = match dice.once_in(4) {
                true => dice.below(self.items.len() as u64) as usize,
                false => self.near.start + dice.below(self.near.len() as u64) as usize,
            };
            let Item { volume, thing, .. } = self.items[number];
            let ask = dice.of(self.items[number].asks(self.volumes[volume].birth()));
            let mut pause = |most| Duration::from_millis(dice.below(most));
            let (rest, patience, regret, wait) = (pause(40), pause(400), pause(100), pause(600));
            // Else it would wait for those who wait for nobody.
            let waits = self.setting == Setting::Offline && ask == Ask::Expand;
            let manner = Manner {
                deadline: (dice.once_in(4) || waits).then_some(patience + POLL),
                cancel: dice.once_in(8).then(|| (format!("{:x}", dice.bits()), regret)),
                wait: dice.once_in(2).then_some(wait),
                number: match ask {
                    Ask::Snapshot => dice.below(3),
                    _ => BYTES + (dice.below(64) << 20),
                },
            };
            let begun = Instant::now();
            let (answer, got): Answer = item::ask(client, &self.volumes[volume], thing, ask, manner).await;
            if answer == Told::CutOff {
                connection = None;
            }
            self.report.count(format!("calls about registered volumes: {ask:?} {answer:?}"));
            let entry = Entry { what: (ask, answer), begun, ended: Instant::now() };
            self.answers.borrow_mut().push((number, got, entry));
            tokio::time::sleep(rest).await;
        }
    }
}

/// Kills and reboots the host while the clients call.
async fn fate(site: &mut Site<'_>, setting: Setting, report: &Report, paused: &Cell<bool>, dice: &mut Dice) {
    let mut next = Instant::now();
    while !paused.get() {
        tokio::time::sleep(POLL).await;
        site.w.revive().await;
        if site.w.dead() {
            report.kill(&site.fault.disarm(), CELL);
            assert!(site.w.launch(&[]).await, "csid ended without a fault");
        } else if Instant::now() >= next {
            strike(site, setting, report, dice).await;
            next = Instant::now() + Duration::from_millis(dice.below(200));
        }
    }
}

async fn strike(site: &mut Site<'_>, setting: Setting, report: &Report, dice: &mut Dice) {
    let plugin = match setting {
        Setting::TwoControllers if dice.once_in(2) => format!("p.{SECOND}"),
        _ => "p".to_owned(),
    };
    match dice.below(12) {
        0..5 => site.fault.arm(&format!("any:{}", 1 + dice.below(60))),
        5 => {
            report.kill("at any time", CELL);
            site.w.kill();
            site.fault.disarm();
            assert!(site.w.launch(&[]).await, "csid ended without a fault");
        }
        6 => {
            site.w.stop().await;
            site.fault.disarm();
            assert!(site.w.launch(&[]).await, "csid ended without a fault");
        }
        7 => {
            let plugin = site.w.plugin(&plugin);
            plugin.kill();
            plugin.start().await;
        }
        _ => {
            let late = dice.below(1500);
            let late = match dice.below(3) {
                0 => Act::Delay(late),
                1 => Act::DelayAfter(late),
                _ => Act::Stubborn(late),
            };
            let rpc = dice.of(&RPCS);
            let act = misbehaviour(dice.of(&Plugin::ALL), rpc, dice).unwrap_or(late);
            site.w.plugin(&plugin).rules([Rule::once(rpc, act)]);
        }
    }
}

//! The calls under way at each slot. An answer is compared with the kernel at once where no other call may have changed the mount
//! meanwhile.

use std::cell::RefCell;

#[derive(Clone, Copy, Default)]
struct Traffic {
    begun: u64,
    open: u64,
}

pub struct Traffics(RefCell<Vec<Traffic>>);

/// Something under way; its number, if nothing else was when it began.
pub struct Ride(Option<u64>);

impl Traffics {
    pub fn new(slots: usize) -> Self {
        Traffics(RefCell::new(vec![Traffic::default(); slots]))
    }

    pub fn enter(&self, slot: usize) -> Ride {
        let traffic = &mut self.0.borrow_mut()[slot];
        traffic.begun += 1;
        traffic.open += 1;
        Ride((traffic.open == 1).then_some(traffic.begun))
    }

    /// Ends a call. Returns whether it was alone all the time.
    pub fn leave(&self, slot: usize, ride: &Ride) -> bool {
        let traffic = &mut self.0.borrow_mut()[slot];
        traffic.open -= 1;
        ride.0 == Some(traffic.begun)
    }
}

#[test]
fn calls_without_overlap_are_alone() {
    let traffic = Traffics::new(2);
    let (first, elsewhere) = (traffic.enter(0), traffic.enter(1));
    assert!(traffic.leave(0, &first), "the other is at another slot");
    let (second, third) = (traffic.enter(0), traffic.enter(0));
    assert!(!traffic.leave(0, &second), "the third began meanwhile");
    assert!(!traffic.leave(0, &third), "the second was there");
    assert!(traffic.leave(1, &elsewhere));
}

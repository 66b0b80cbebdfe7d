//! Logins that failed, and how they slow down those that come next.
//!
//! Who guesses passwords has to wait for each answer, the right one too: 100 ms after the first failure for a user, twice as
//! long after each further one, up to 5 s; and the same for an address, whoever it logs in as. An address may stand for many
//! clients, so it has a few failures free. A minute without a failure, and all is forgotten.
//!
//! ```text
//!   proof of a password --> wait: the longer of user's and address's --> its turn: check --> wrong: note it for both
//!                            ^                                             |
//!                            `--- somebody of that address has failed for --´
//!                                 that user meanwhile: from then on, anew
//! ```
//!
//! So guesses that are made side by side take as long as those that are made one after the other. A check and the note that
//! it has failed are one step, under the lock of the table (a few microseconds: what is dear about a password is done by the
//! client): of all who wait for the same moment one is checked, and if it was wrong the others look again, and wait from
//! then on. If it was right they are checked at once, and where nothing has failed lately nobody waits: an application may
//! open all its connections in the same moment.
//!
//! Only failures of the same address *for the same user* make who waits already wait anew. Others lengthen the wait to 5 s,
//! counted from its beginning, and no more: else who guesses all the time, from wherever, would shut out the user himself.
//! The price is that who has many addresses has as many guesses in 5 s. Who shares an address with somebody who guesses his
//! name waits in line with him, and is refused when that would take longer than 30 s.
//!
//! Names count as they are said, whether there is such a user or not, so nobody learns which there are. Nothing is held while
//! a client waits but its connection, of which there are only so many ([`crate::crowd`]). The table is bounded: when it is full,
//! who failed the longest ago is forgotten.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};

/// What the first failure that counts costs.
const FIRST_DELAY: Duration = Duration::from_millis(100);
const LONGEST_DELAY: Duration = Duration::from_secs(5);
/// Who would have to wait for longer is refused.
const LONGEST_WAIT: Duration = Duration::from_secs(30);
/// How long nothing may fail until it is forgotten.
const PEACE: Duration = Duration::from_secs(60);
/// Failures of an address that cost nothing.
const FREE_OF_ADDRESS: u32 = 10;
/// Users, addresses, and pairs of them, that are remembered at most.
const REMEMBERED: usize = 30_000;

/// Who failed.
#[derive(Clone, Copy)]
pub(crate) struct Who<'a> {
    /// `None` for who came with a token: it names nobody.
    pub(crate) user: Option<&'a str>,
    /// `None` if it is not known.
    pub(crate) address: Option<IpAddr>,
}

/// The failures of one user or address, or of the one from the other.
struct Failed {
    times: u32,
    last: Instant,
}

/// By a hash that nobody can foresee: a name may be long.
type Table = HashMap<u64, Failed>;

/// The logins that failed lately.
pub(crate) struct Failures {
    table: Mutex<Table>,
    hash: RandomState,
}

/// Too many guess: it would take too long to wait for a turn.
#[derive(Debug)]
pub(crate) struct Crowded;

/// The right to check one proof. Nobody else checks any meanwhile, so it is to be kept for the check alone.
pub(crate) struct Turn<'a> {
    failures: &'a Failures,
    table: MutexGuard<'a, Table>,
    who: Who<'a>,
}

impl Turn<'_> {
    /// The proof was wrong.
    pub(crate) fn failed(mut self, now: Instant) {
        let Turn { failures, table, who } = &mut self;
        let counted = failures.counted(*who).map(|(key, _)| key);
        for key in counted.chain([failures.pair(*who)]) {
            note(table, key, now);
        }
    }
}

impl Failures {
    pub(crate) fn new() -> Failures {
        Failures { table: Mutex::default(), hash: RandomState::new() }
    }

    /// Waits until a proof may be checked.
    pub(crate) async fn turn<'a>(&'a self, who: Who<'a>) -> Result<Turn<'a>, Crowded> {
        let arrived = Instant::now();
        loop {
            let ready = match self.look(who, arrived, Instant::now()) {
                Ok(turn) => return Ok(turn),
                Err(ready) => ready,
            };
            if ready.saturating_duration_since(arrived) > LONGEST_WAIT {
                return Err(Crowded);
            }
            tokio::time::sleep_until(ready.into()).await;
        }
    }

    /// The turn of who has come at `arrived`, or when to look again.
    fn look<'a>(&'a self, who: Who<'a>, arrived: Instant, now: Instant) -> Result<Turn<'a>, Instant> {
        let table = self.table.lock();
        let lately =
            |key: u64| table.get(&key).filter(|failed| now.saturating_duration_since(failed.last) < PEACE);
        let delays = self.counted(who).filter_map(|(key, free)| {
            lately(key).map(|failed| delay_after(failed.times.saturating_sub(free)))
        });
        let delay = delays.max().unwrap_or_default();
        let since = lately(self.pair(who)).map_or(arrived, |failed| failed.last.max(arrived));
        let ready = since + delay;
        if ready > now {
            return Err(ready);
        }
        Ok(Turn { failures: self, table, who })
    }

    /// What counts, and how many failures of each are free.
    fn counted(&self, who: Who<'_>) -> impl Iterator<Item = (u64, u32)> {
        let user = who.user.map(|user| (self.hash.hash_one((0, user)), 0));
        let address = who.address.map(|address| (self.hash.hash_one((1, site(address))), FREE_OF_ADDRESS));
        user.into_iter().chain(address)
    }

    /// Who waits for each other.
    fn pair(&self, who: Who<'_>) -> u64 {
        self.hash.hash_one((2, who.user, who.address.map(site)))
    }
}

fn note(table: &mut Table, key: u64, now: Instant) {
    if table.len() >= REMEMBERED && !table.contains_key(&key) {
        make_room(table, now);
    }
    let failed = table.entry(key).or_insert(Failed { times: 0, last: now });
    if now.saturating_duration_since(failed.last) >= PEACE {
        failed.times = 0;
    }
    failed.times = failed.times.saturating_add(1);
    failed.last = now;
}

/// What stands for all addresses that one client can easily have: with IPv6 those are the lower 64 bits.
fn site(address: IpAddr) -> u128 {
    match address.to_canonical() {
        IpAddr::V4(address) => u128::from(address.to_bits()),
        IpAddr::V6(address) => address.to_bits() & !u128::from(u64::MAX),
    }
}

fn delay_after(failures: u32) -> Duration {
    match failures {
        0 => Duration::ZERO,
        _ => FIRST_DELAY.saturating_mul(2_u32.saturating_pow(failures - 1)).min(LONGEST_DELAY),
    }
}

/// Forgets what is over; if nothing is, who failed the longest ago.
fn make_room(table: &mut Table, now: Instant) {
    table.retain(|_, failed| now.saturating_duration_since(failed.last) < PEACE);
    if table.len() >= REMEMBERED
        && let Some(oldest) = table.iter().min_by_key(|(_, failed)| failed.last).map(|(key, _)| *key)
    {
        table.remove(&oldest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn who<'a>(user: &'a str, address: &str) -> Who<'a> {
        Who { user: Some(user), address: Some(address.parse().unwrap()) }
    }

    fn nowhere(user: &str) -> Who<'_> {
        Who { user: Some(user), address: None }
    }

    /// How long who comes now has to wait.
    fn delay(failures: &Failures, who: Who<'_>, now: Instant) -> Duration {
        failures.look(who, now, now).err().map_or(Duration::ZERO, |ready| ready - now)
    }

    /// A wrong proof, after its wait.
    fn fail(failures: &Failures, who: Who<'_>, now: Instant) {
        failures.look(who, now - LONGEST_DELAY, now).ok().unwrap().failed(now);
    }

    #[test]
    fn each_failure_doubles_the_wait_up_to_a_bound_until_there_is_peace() {
        let failures = Failures::new();
        let mut now = Instant::now() + PEACE;
        let mut delays = Vec::new();
        for _ in 0..8 {
            let delay = delay(&failures, who("anna", "10.0.0.1"), now);
            delays.push(delay.as_millis());
            now += delay;
            fail(&failures, who("anna", "10.0.0.1"), now);
        }
        assert_eq!(delays, [0, 100, 200, 400, 800, 1600, 3200, 5000]);
        for _ in 0..100 {
            now += LONGEST_DELAY;
            fail(&failures, who("anna", "10.0.0.1"), now);
        }
        assert_eq!(delay(&failures, who("anna", "10.0.0.2"), now), LONGEST_DELAY, "from elsewhere, too");
        assert_eq!(delay(&failures, who("bert", "10.0.0.2"), now), Duration::ZERO);
        assert_eq!(delay(&failures, who("anna", "10.0.0.1"), now + PEACE), Duration::ZERO);
        fail(&failures, who("anna", "10.0.0.1"), now + PEACE);
        assert_eq!(delay(&failures, who("anna", "10.0.0.1"), now + PEACE), FIRST_DELAY);
    }

    /// When each of so many who have come at once is checked, in the order in which they are; nobody after half a minute.
    fn checked(failures: &Failures, many: usize, who: Who<'_>, begun: Instant, right: bool) -> Vec<u128> {
        let (mut checked, mut waiting) = (Vec::new(), vec![begun; many]);
        while let Some(next) = waiting.iter().min().copied().filter(|next| *next <= begun + LONGEST_WAIT) {
            for place in (0..waiting.len()).rev().filter(|place| waiting[*place] == next).collect::<Vec<_>>()
            {
                match failures.look(who, begun, next) {
                    Err(ready) => waiting[place] = ready,
                    Ok(turn) => {
                        if !right {
                            turn.failed(next);
                        }
                        checked.push((next - begun).as_millis());
                        waiting.swap_remove(place);
                    }
                }
            }
        }
        checked
    }

    #[test]
    fn guesses_side_by_side_take_as_long_as_one_after_the_other() {
        let (failures, begun) = (Failures::new(), Instant::now());
        let wrong = checked(&failures, 100, who("anna", "10.0.0.1"), begun, false);
        assert_eq!(wrong, [0, 100, 300, 700, 1500, 3100, 6300, 11300, 16300, 21300, 26300]);
        // Nor does it help to guess tokens, which name nobody; but for those that are free.
        let tokens = Who { user: None, address: Some("10.0.0.2".parse().unwrap()) };
        let wrong = checked(&failures, 100, tokens, begun, false);
        assert_eq!(wrong[..13], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 100, 300]);
    }

    #[test]
    fn right_ones_side_by_side_do_not_wait_for_each_other() {
        let (failures, begun) = (Failures::new(), Instant::now());
        assert_eq!(checked(&failures, 100, who("anna", "10.0.0.1"), begun, true), [0; 100]);
        failures.look(who("anna", "10.0.0.1"), begun, begun).ok().unwrap().failed(begun);
        assert_eq!(checked(&failures, 100, who("anna", "10.0.0.1"), begun, true), [100; 100]);
    }

    #[test]
    fn who_guesses_elsewhere_shuts_nobody_out() {
        let (failures, begun) = (Failures::new(), Instant::now());
        let mut now = begun;
        for _ in 0..7 {
            while let Err(ready) = failures.look(who("anna", "10.0.0.2"), begun, now) {
                now = ready;
            }
            fail(&failures, who("anna", "10.0.0.2"), now);
        }
        let waits = |address| failures.look(who("anna", address), begun, now).err();
        assert!(now > begun + LONGEST_DELAY);
        assert_eq!(waits("10.0.0.1"), None, "it has waited for long enough, whatever failed meanwhile");
        assert_eq!(waits("10.0.0.2"), Some(now + LONGEST_DELAY));
    }

    #[test]
    fn an_address_is_slowed_down_whoever_it_says_it_is() {
        let (failures, now) = (Failures::new(), Instant::now() + PEACE);
        let names: Vec<String> = (0..=FREE_OF_ADDRESS).map(|n| format!("u{n}")).collect();
        for name in &names {
            assert_eq!(delay(&failures, who("new", "2001:db8::1"), now), Duration::ZERO);
            fail(&failures, who(name, "2001:db8::1"), now);
        }
        assert_eq!(delay(&failures, who("new", "2001:db8::1"), now), FIRST_DELAY);
        assert_eq!(delay(&failures, who("new", "2001:db8::ffff:2"), now), FIRST_DELAY, "the same network");
        assert_eq!(delay(&failures, who("new", "2001:db8:0:1::1"), now), Duration::ZERO);
        assert_eq!(delay(&failures, Who { user: Some("new"), address: None }, now), Duration::ZERO);
    }

    #[test]
    fn the_table_is_bounded_and_forgets_the_oldest() {
        let (failures, start) = (Failures::new(), Instant::now() + PEACE);
        let user = |name: &str, ms: u64| fail(&failures, nowhere(name), start + Duration::from_millis(ms));
        user("first", 0);
        user("second", 1);
        // Each has two entries: its own, and that of its (unknown) address for it.
        for n in 0..REMEMBERED as u64 / 2 - 1 {
            user(&n.to_string(), 2 + n % 1000);
        }
        assert_eq!(failures.table.lock().len(), REMEMBERED);
        let delay = |user| delay(&failures, nowhere(user), start + Duration::from_secs(2));
        assert_eq!((delay("first"), delay("second")), (Duration::ZERO, FIRST_DELAY));
        fail(&failures, nowhere("late"), start + 2 * PEACE);
        assert_eq!(failures.table.lock().len(), 2);
    }
}

//! Each rule is needed: without it the simulator finds the violation that the rule prevents.
//!
//! `SIMULATION_SEEDS=N` tries N seeds for each rule.

use fulmar_cluster::Rules;

use crate::campaign::{Campaign, Found, number};
use crate::run::{Features, Options, Outcome};
use crate::violation::Kind;

/// Seeds tried before a rule counts as unneeded.
const SEEDS: u64 = 10_000;

/// Transactions, moves and failovers.
const CORE: Features = Features::NONE;
const READS: Features = Features { is_hot: true, ..CORE };
const COLLECTION: Features = Features { collection: true, exports: true, pace: 4, ..CORE };
const DURABILITY: Features = Features { durability: true, ..CORE };
const MIGRATIONS: Features = Features { migrations: true, pace: 4, ..CORE };
const POISON: Features = Features { poison: true, ..CORE };

/// Requires that some run under these rules violates one of these properties.
fn finds(name: &str, rules: Rules, features: Features, kinds: &[Kind]) {
    let options = Options { rules, features: Some(features), ..Options::DEFAULT };
    let seeds = number("SIMULATION_SEEDS").unwrap_or(SEEDS);
    let violates =
        |outcome: &Outcome| outcome.violations.iter().any(|violation| kinds.contains(&violation.kind));
    let (_, found) = Campaign::new(seeds, options).find(violates);
    let Some(Found { seed, outcome }) = found else {
        panic!("without the rule {name}, no {kinds:?} in {seeds} seeds");
    };
    let violation = outcome.violations.iter().find(|violation| kinds.contains(&violation.kind));
    println!("{name}: found after {} seeds: {}", seed + 1, violation.unwrap());
}

macro_rules! needed {
    ($($features:ident { $($rule:ident: $($kind:ident)|+,)* })*) => {
        $($(#[test]
        fn $rule() {
            let rules = Rules { $rule: false, ..Rules::ALL };
            finds(stringify!($rule), rules, $features, &[$(Kind::$kind),+]);
        })*)*
    };
}

needed!(
    CORE {
        seal_own_log: Lost | MissingLog | VersionGap,
        compare_nodes: Lost | MissingLog | NoOwner | VersionGap | Forked,
        seal_before_assigning: Lost | MissingLog | VersionGap | Forked,
        release: Lost | Forked,
        settle_by_writing: Lost | Forked | OpenedTwice | VersionGap,
        ask_outcome: Duplicated,
        refuse_asked: Duplicated,
        keep_closed_ranges: MissingLog | Lost,
        named_manifests: Lost | Forked | MissingLog | VersionGap,
        durable_manifests: Lost | MissingLog | VersionGap | Forked | Duplicated,
        create_if_absent: Lost | MissingLog | VersionGap,
        contiguous: Lost | MissingLog | VersionGap | Forked,
        linearizable_reads: Lost | StaleRead | OpenedTwice | VersionGap | Forked | MissingLog,
    }
    READS {
        lease: StaleRead,
        wait_out_lease: StaleRead,
        boot_time: StaleRead,
    }
    COLLECTION {
        disown: MissingSegment,
        ended_makers: MissingSegment,
        promise_first: MissingSegment,
        settle_manifests: MissingSegment,
        store_clock: MissingManifest,
        holds: MissingHeld,
        fence_collector: MissingHeld,
    }
    DURABILITY {
        hold_during_change: Lost | VersionGap | Forked,
        local_stays: Lost | VersionGap | MissingLog | Forked,
        match_directory: Lost | VersionGap | MissingPages | Forked | MissingLog,
    }
    MIGRATIONS {
        compare_journal: MissingPages | Lost,
        refuse_stale_commands: Lost | Forked | VersionGap,
        copy_before_change: MissingPages | Lost | Forked,
        pin_pages: MissingPages,
    }
    POISON {
        replay_once: KilledAgain,
        quarantine: QuarantineIgnored,
        reported_deaths_only: WronglyQuarantined,
        count_deaths_once: WronglyQuarantined,
    }
);

/// This rule detects violations of `keep_closed_ranges`. Without both, commits are lost silently.
#[test]
fn no_gaps() {
    let rules = Rules { keep_closed_ranges: false, no_gaps: false, ..Rules::ALL };
    finds("no_gaps", rules, CORE, &[Kind::Lost]);
}

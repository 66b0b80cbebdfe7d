//! The journal with scripted sessions: what is sent again, and what the client gets.

use std::cell::Cell;

use fulmar_engine::TransactionStatus;
use fulmar_pgwire::protocol::backend;

use super::journal::{Journal, Mismatch, Told};
use super::message;
use super::settle::lost_answers;
use crate::cluster::TransactionOutcome::{self, Aborted, Committed, Forgotten};

fn journal() -> Journal {
    let next = Cell::new(0);
    Journal::new(
        Vec::new(),
        Box::new(move || {
            next.set(next.get() + 1);
            next.get()
        }),
    )
}

fn message(kind: u8, body: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    message::put(&mut out, kind, body);
    out
}

fn query(sql: &str) -> Vec<u8> {
    message(b'Q', format!("{sql}\0").as_bytes())
}

fn parse(name: &str, sql: &str) -> Vec<u8> {
    message(b'P', format!("{name}\0{sql}\0\0\0").as_bytes())
}

fn bind(portal: &str, statement: &str) -> Vec<u8> {
    message(b'B', format!("{portal}\0{statement}\0\0\0\0\0\0\0").as_bytes())
}

fn execute() -> Vec<u8> {
    message(b'E', b"\0\0\0\0\0")
}

fn sync() -> Vec<u8> {
    message(b'S', b"")
}

fn ready(status: TransactionStatus) -> Vec<u8> {
    let mut out = Vec::new();
    backend::ready(&mut out, status);
    out
}

/// The messages of the client that are to be sent, without those for the session only.
fn sent(journal: &mut Journal) -> Vec<u8> {
    let bytes = std::mem::take(&mut journal.unsent);
    let (mut rest, mut out) = (&bytes[..], Vec::new());
    while !rest.is_empty() {
        let length = 1 + u32::from_be_bytes(rest[1..5].try_into().unwrap()) as usize;
        let (first, after) = rest.split_at(length.min(rest.len()));
        if !is_about_transactions(first[0]) {
            out.extend_from_slice(first);
        }
        rest = after;
    }
    out
}

fn is_about_transactions(kind: u8) -> bool {
    matches!(kind, message::TRANSACTION | message::REPEATED | message::ABANDONED | message::REPETITION_ENDED)
}

/// The messages for the session only, with the numbers in them.
fn sent_ids(journal: &mut Journal) -> Vec<(u8, u64)> {
    let bytes = std::mem::take(&mut journal.unsent);
    let (mut rest, mut out) = (&bytes[..], Vec::new());
    while !rest.is_empty() {
        let length = 1 + u32::from_be_bytes(rest[1..5].try_into().unwrap()) as usize;
        let (first, after) = rest.split_at(length);
        if is_about_transactions(first[0]) {
            let number = first[5..].try_into().map_or(0, u64::from_be_bytes);
            out.push((first[0], number));
        }
        rest = after;
    }
    out
}

#[test]
fn repeated_transaction_keeps_its_origin() {
    use message::{ABANDONED, REPEATED, REPETITION_ENDED, TRANSACTION};
    let mut journal = journal();
    let begun = [message(b'C', b"BEGIN\0"), ready(TransactionStatus::InTransaction)].concat();
    let selected = [message(b'D', b"row"), ready(TransactionStatus::InTransaction)].concat();
    journal.feed(&query("BEGIN")).unwrap();
    assert_eq!(sent_ids(&mut journal), [(TRANSACTION, 1)]);
    // The session ends before it answers: nothing is repeated.
    journal.begin_again();
    assert_eq!(sent_ids(&mut journal), [(TRANSACTION, 2), (ABANDONED, 1)]);
    journal.answer(&begun).unwrap();
    journal.feed(&query("SELECT 1")).unwrap();
    journal.answer(&selected).unwrap();
    journal.feed(&query("COMMIT")).unwrap();
    assert_eq!(sent_ids(&mut journal), [(TRANSACTION, 3), (TRANSACTION, 4)]);
    let repeated =
        |begin, select| [(TRANSACTION, begin), (REPEATED, 2), (TRANSACTION, select), (REPEATED, 3)];
    journal.begin_again();
    assert_eq!(sent_ids(&mut journal), repeated(5, 6));
    journal.answer(&begun).unwrap();
    assert_eq!(sent_ids(&mut journal), [], "an answer has not been compared");
    // The database moves again.
    journal.begin_again();
    assert_eq!(sent_ids(&mut journal), repeated(7, 8));
    journal.answer(&[&begun[..], &selected].concat()).unwrap();
    assert_eq!(sent_ids(&mut journal), [(REPETITION_ENDED, 0), (TRANSACTION, 9), (ABANDONED, 4)]);
}

#[test]
fn an_open_transaction_is_repeated_and_its_known_answers_are_suppressed() {
    let mut journal = journal();
    let (begin, select) = (query("BEGIN"), query("SELECT 1"));
    let begun = [message(b'C', b"BEGIN\0"), ready(TransactionStatus::InTransaction)].concat();
    let row = message(b'D', b"row");
    journal.feed(&begin).unwrap();
    journal.feed(&select).unwrap();
    assert_eq!(sent(&mut journal), [&begin[..], &select].concat());
    // The connection breaks in the middle of the row.
    assert_eq!(journal.answer(&begun), Ok(None));
    assert_eq!(journal.answer(&row[..6]), Ok(None));
    assert!(journal.is_inside_answer());
    let first = std::mem::take(&mut journal.output);
    journal.begin_again();
    assert_eq!(sent(&mut journal), [&begin[..], &select].concat());
    for byte in
        [&begun[..], &row, &message(b'C', b"SELECT 1\0"), &ready(TransactionStatus::InTransaction)].concat()
    {
        assert_eq!(journal.answer(&[byte]), Ok(None));
    }
    let got = [first, journal.output.clone()].concat();
    let expected =
        [&begun[..], &row, &message(b'C', b"SELECT 1\0"), &ready(TransactionStatus::InTransaction)].concat();
    assert_eq!(got, expected);
    assert_eq!((journal.status, journal.units.len()), (TransactionStatus::InTransaction, 0));
    assert!(!journal.is_idle());
}

#[test]
fn answer_of_a_committed_statement_is_kept_until_its_session_is_lost() {
    let answer = [message(b'1', b""), message(b'2', b""), message(b'C', b"INSERT 0 1\0")].concat();
    let insert = [parse("s", "INSERT"), bind("", "s"), execute()].concat();
    let complete = [&answer[..], &ready(TransactionStatus::Idle)].concat();
    let mut journal = journal();
    journal.feed(&[&insert[..], &sync()].concat()).unwrap();
    assert_eq!(journal.answer(&message(message::COMMITTED, &answer)), Ok(None));
    assert!(journal.output.is_empty());
    assert_eq!(journal.answer_committed(), Ok(true));
    assert_eq!(journal.output, complete);
    assert!(journal.is_idle());
    sent(&mut journal);
    journal.begin_again();
    let prepared = [parse("s", "INSERT"), sync()].concat();
    assert_eq!(sent(&mut journal), prepared, "the statement was prepared");

    // The client has got a part of the answer from the session, or has not sent Sync.
    let mut journal = super::tests::journal();
    journal.feed(&[&insert[..], &sync()].concat()).unwrap();
    journal.answer(&[&message(message::COMMITTED, &answer)[..], &answer[..3]].concat()).unwrap();
    assert_eq!(journal.answer_committed(), Ok(false));
    let mut journal = super::tests::journal();
    journal.feed(&insert).unwrap();
    journal.answer(&message(message::COMMITTED, &answer)).unwrap();
    assert_eq!(journal.answer_committed(), Ok(false));

    // Another session has not said that it has committed.
    let mut journal = super::tests::journal();
    journal.feed(&[&insert[..], &sync()].concat()).unwrap();
    journal.answer(&message(message::COMMITTED, &answer)).unwrap();
    journal.begin_again();
    assert_eq!(journal.answer_committed(), Ok(false));
}

#[test]
fn a_different_or_shorter_answer_is_noticed() {
    for other in [message(b'D', b"other"), message(b'D', b"row"), Vec::new()] {
        let mut journal = journal();
        journal.feed(&query("BEGIN; SELECT random()")).unwrap();
        let answer = [message(b'D', b"row 1"), ready(TransactionStatus::InTransaction)].concat();
        journal.answer(&answer).unwrap();
        journal.reset();
        journal.begin_again();
        journal.feed(&query("COMMIT")).unwrap();
        let outcome = journal.answer(&[other, ready(TransactionStatus::InTransaction)].concat());
        assert_eq!(outcome, Err(Mismatch));
        let oldest = journal.units.front().unwrap();
        assert!(oldest.is_answered, "the COMMIT has not been sent");
    }
}

#[test]
fn transactions_in_doubt_have_the_id_that_the_session_got() {
    let mut journal = journal();
    journal.feed(&[query("BEGIN"), query("INSERT"), query("COMMIT"), query("INSERT")].concat()).unwrap();
    journal.answer(&ready(TransactionStatus::InTransaction)).unwrap();
    journal.answer(&ready(TransactionStatus::InTransaction)).unwrap();
    assert_eq!(journal.transactions_in_doubt(), [1, 4], "of BEGIN, and of the second INSERT");
    journal.reset();
    journal.begin_again();
    // The second session ends before it has answered anything.
    journal.reset();
    // The COMMIT and the INSERT were held back: their ids have been decided before.
    assert_eq!(journal.transactions_in_doubt(), [5, 4]);
    journal.feed(&query("COMMIT; SELECT 1")).unwrap();
    assert_eq!(
        journal.transactions_in_doubt(),
        [5, 4, 0],
        "a unit with the end of a transaction is not known"
    );
}

#[test]
fn prepared_statements_are_restored() {
    let mut journal = journal();
    let (one, two) = (parse("one", "SELECT 1"), parse("two", "SELECT 2"));
    let close = message(b'C', b"Sone\0");
    journal.feed(&[one, two.clone(), sync(), close, sync()].concat()).unwrap();
    let parsed = message(b'1', b"");
    let idle = ready(TransactionStatus::Idle);
    journal
        .answer(&[parsed.clone(), parsed.clone(), idle.clone(), message(b'3', b""), idle.clone()].concat())
        .unwrap();
    assert!(journal.is_idle());
    journal.output.clear();
    journal.begin_again();
    assert_eq!(sent(&mut journal), [two, sync()].concat());
    journal.answer(&[parsed, idle].concat()).unwrap();
    assert_eq!(journal.output, b"", "the client does not get the answers");
    // The third session cannot prepare it: it is forgotten.
    journal.begin_again();
    journal.answer(&[message(b'E', b"no such table"), ready(TransactionStatus::Idle)].concat()).unwrap();
    journal.begin_again();
    assert_eq!(sent(&mut journal), b"");
}

#[test]
fn statements_that_failed_or_were_skipped_are_not_restored() {
    let mut journal = journal();
    journal.feed(&[parse("one", "SELEKT"), parse("two", "SELECT 2"), sync()].concat()).unwrap();
    journal.answer(&[message(b'E', b"syntax"), ready(TransactionStatus::Idle)].concat()).unwrap();
    journal.begin_again();
    assert_eq!(sent(&mut journal), b"");
}

#[test]
fn copies_in_the_extended_protocol_are_one_unit() {
    let copy = [parse("", "COPY t FROM STDIN"), bind("", ""), execute(), sync()].concat();
    let data = [message(b'd', b"1\n"), message(b'c', b"")].concat();
    for answered_early in [true, false] {
        let mut journal = journal();
        journal.feed(&copy).unwrap();
        if answered_early {
            journal.answer(&message(b'G', b"\0\0\0")).unwrap();
            journal.feed(&[&data[..], &sync()].concat()).unwrap();
        } else {
            journal.feed(&[&data[..], &sync()].concat()).unwrap();
            journal.answer(&message(b'G', b"\0\0\0")).unwrap();
        }
        assert_eq!(journal.units.len(), 1, "{answered_early}");
        journal.answer(&[message(b'C', b"COPY 1\0"), ready(TransactionStatus::Idle)].concat()).unwrap();
        assert!(journal.is_idle(), "{answered_early}");
    }
}

#[test]
fn a_failed_unit_is_skipped_up_to_sync() {
    let mut journal = journal();
    let begun = [query("BEGIN"), parse("", "SELECT 1")].concat();
    journal.feed(&begun).unwrap();
    journal.answer(&ready(TransactionStatus::InTransaction)).unwrap();
    journal.output.clear();
    journal.transaction_failed();
    assert!(journal.fail(b"error", TransactionStatus::Failed));
    journal.begin_again();
    assert_eq!(sent(&mut journal), message(message::FAILED, b""));
    journal.feed(&[bind("", ""), execute()].concat()).unwrap();
    assert_eq!(journal.output, b"error");
    journal.feed(&[sync(), query("ROLLBACK")].concat()).unwrap();
    assert_eq!(journal.output, [b"error", &ready(TransactionStatus::Failed)[..]].concat());
    assert_eq!(sent(&mut journal), query("ROLLBACK"));
}

#[test]
fn a_long_transaction_is_not_kept() {
    let mut journal = journal();
    journal.feed(&query("BEGIN")).unwrap();
    journal.answer(&ready(TransactionStatus::InTransaction)).unwrap();
    let long = query(&"x".repeat(600 << 10));
    for _ in 0..2 {
        journal.feed(&long).unwrap();
        journal.answer(&ready(TransactionStatus::InTransaction)).unwrap();
    }
    assert!(journal.is_lost);
    journal.feed(&query("COMMIT")).unwrap();
    journal.answer(&ready(TransactionStatus::Idle)).unwrap();
    assert!(!journal.is_lost, "the next transaction can be repeated");
}

#[test]
fn a_commit_is_answered_in_both_protocols() {
    let tag = message(b'C', b"COMMIT\0");
    let idle = ready(TransactionStatus::Idle);
    let extended = [parse("", "COMMIT"), bind("", ""), message(b'D', b"P\0"), execute(), sync()].concat();
    let answers =
        [message(b'1', b""), message(b'2', b""), message(b'n', b""), tag.clone(), idle.clone()].concat();
    for (request, expected) in [(query("commit;"), [tag, idle].concat()), (extended, answers)] {
        let mut journal = journal();
        journal.feed(&request).unwrap();
        assert!(journal.units[0].is_commit);
        journal.answer_commit();
        assert_eq!(journal.output, expected);
        assert!(journal.is_idle());
    }
}

#[test]
fn messages_between_the_nodes_do_not_reach_the_client() {
    let mut journal = journal();
    journal.feed(&query("SET x.y = 1")).unwrap();
    let settings = message(message::SETTINGS, br#"[["x.y","1"]]"#);
    let ready = ready(TransactionStatus::Idle);
    assert_eq!(journal.answer(&[settings, ready.clone()].concat()), Ok(None));
    assert_eq!((&journal.output, &journal.values), (&ready, &vec![("x.y".to_owned(), "1".to_owned())]));
    assert_eq!(journal.answer(&message(message::MOVED, &[1])), Ok(Some(Told::Moved { in_part: true })));
    assert_eq!(journal.answer(&message(message::END, &[])), Ok(Some(Told::End)));
}

#[test]
fn units_that_follow_known_answers_are_sent_when_those_are_the_same() {
    let mut journal = journal();
    let (insert, commit) = (query("INSERT"), query("COMMIT"));
    journal.feed(&[query("BEGIN"), insert.clone(), commit.clone()].concat()).unwrap();
    let begun = ready(TransactionStatus::InTransaction);
    journal.answer(&begun).unwrap();
    // The client has got a part of the answer to the INSERT.
    let notice = message(b'N', b"notice");
    journal.answer(&notice[..7]).unwrap();
    journal.begin_again();
    assert_eq!(sent(&mut journal), [query("BEGIN"), insert].concat());
    assert!(journal.is_holding);
    journal.answer(&begun).unwrap();
    assert!(journal.is_holding);
    journal.answer(&notice).unwrap();
    assert!(!journal.is_holding);
    assert_eq!(sent(&mut journal), commit);
}

#[test]
fn a_query_after_messages_without_sync_is_refused() {
    let flush = message(b'H', b"");
    let mut journal = journal();
    journal.feed(&[parse("s", "SELECT 1"), flush.clone()].concat()).unwrap();
    journal.feed(&query("INSERT")).unwrap_err();
    let mut journal = super::tests::journal();
    journal.feed(&[flush.clone(), query("INSERT"), flush].concat()).unwrap();
    assert_eq!(journal.units.len(), 1, "a Flush has no answer");
}

#[test]
fn messages_between_the_nodes_are_not_accepted_from_the_client() {
    let id = message(message::TRANSACTION, &7_u64.to_be_bytes());
    journal().feed(&id).unwrap_err();
}

/// A committed transaction includes all units up to its end, whose own ids were not used.
#[test]
fn a_transaction_that_begins_in_a_pipeline_ends_with_its_commit() {
    let pipeline = [query("BEGIN"), query("INSERT"), query("COMMIT"), query("INSERT")].concat();
    let mut journal = journal();
    journal.feed(&pipeline).unwrap();
    assert_eq!(journal.end_of_transaction(0), 2);
    assert_eq!(journal.end_of_transaction(3), 3);
    journal.answer(&ready(TransactionStatus::InTransaction)).unwrap();
    assert_eq!(journal.end_of_transaction(0), 1, "BEGIN is answered");
    let mut journal = super::tests::journal();
    journal.feed(&[query("SELECT 1; BEGIN"), query("INSERT")].concat()).unwrap();
    assert_eq!(journal.end_of_transaction(0), 1, "without COMMIT, all units");
}

#[test]
fn statements_are_restored_before_a_failed_transaction() {
    let mut journal = journal();
    let prepare = [parse("s", "SELECT 1"), sync()].concat();
    journal.feed(&prepare).unwrap();
    journal.answer(&[message(b'1', b""), ready(TransactionStatus::Idle)].concat()).unwrap();
    journal.transaction_failed();
    journal.begin_again();
    assert_eq!(sent(&mut journal), [prepare, message(message::FAILED, b"")].concat());
}

/// What the answers to units say whose transactions have these outcomes.
fn answers(journal: &Journal, outcomes: &[TransactionOutcome]) -> Vec<&'static str> {
    let ids = journal.transactions_in_doubt();
    let errors = lost_answers(journal, &ids, outcomes);
    let kind = |error: &fulmar_engine::Error| match error.state() {
        "40001" => "no effect",
        "08007" if error.to_string().contains("Check the data") => "unknown",
        "08007" => "committed",
        other => other,
    };
    errors.iter().map(kind).collect()
}

#[test]
fn each_unit_is_answered_with_the_outcome_of_its_transaction() {
    let mut journal = journal();
    journal.feed(&[query("INSERT"), query("INSERT"), query("INSERT")].concat()).unwrap();
    let none: [&str; 0] = [];
    assert_eq!(answers(&journal, &[Aborted, Aborted, Aborted]), none, "all are repeated");
    assert_eq!(answers(&journal, &[Committed, Aborted, Aborted]), ["committed"]);
    assert_eq!(answers(&journal, &[Aborted, Committed, Aborted]), ["no effect", "committed"]);
    assert_eq!(answers(&journal, &[Forgotten, Aborted, Committed]), ["unknown", "no effect", "committed"]);

    // The transaction of a pipeline, and a statement after it.
    let mut journal = super::tests::journal();
    let pipeline = [query("BEGIN"), query("INSERT"), query("COMMIT"), query("INSERT")].concat();
    journal.feed(&pipeline).unwrap();
    assert_eq!(answers(&journal, &[Committed, Aborted, Aborted, Aborted]), ["committed"; 3]);
    assert_eq!(answers(&journal, &[Committed, Aborted, Aborted, Committed]), ["committed"; 4]);
    assert_eq!(
        answers(&journal, &[Aborted, Aborted, Aborted, Committed]),
        ["no effect", "no effect", "no effect", "committed"]
    );

    // An open transaction that is committed, and others after it.
    let mut journal = super::tests::journal();
    journal
        .feed(&[query("BEGIN"), query("INSERT"), query("COMMIT"), query("BEGIN; INSERT")].concat())
        .unwrap();
    journal.answer(&ready(TransactionStatus::InTransaction)).unwrap();
    assert_eq!(answers(&journal, &[Committed, Aborted, Aborted]), ["committed"; 2]);
    assert_eq!(answers(&journal, &[Committed, Aborted, Forgotten]), ["committed", "committed", "unknown"]);
}

#[test]
fn parameters_of_an_open_transaction_apply_when_it_was_committed() {
    let values = |value: &str| vec![("x.y".to_owned(), value.to_owned())];
    let pending = message(message::PENDING_SETTINGS, br#"[["x.y","2"]]"#);
    let begun = [pending, ready(TransactionStatus::InTransaction)].concat();
    for is_committed in [true, false] {
        let mut journal = journal();
        journal.values = values("1");
        journal.feed(&query("BEGIN; SET x.y = 2")).unwrap();
        journal.answer(&begun).unwrap();
        assert_eq!(journal.output, ready(TransactionStatus::InTransaction));
        assert_eq!(journal.values, values("1"), "not committed yet");
        journal.feed(&query(if is_committed { "COMMIT" } else { "ROLLBACK" })).unwrap();
        if is_committed {
            journal.answer_commit();
        } else {
            journal.answer(&ready(TransactionStatus::Idle)).unwrap();
            journal.feed(&query("COMMIT")).unwrap();
            journal.answer_commit();
        }
        assert_eq!(journal.values, values(if is_committed { "2" } else { "1" }));
    }
}

#[test]
fn a_front_keeps_a_bounded_number_of_units() {
    let mut journal = journal();
    let (mut fed, insert) = (0, query("INSERT"));
    while !journal.is_full() {
        journal.feed(&insert).unwrap();
        fed += 1;
    }
    assert_eq!(fed, 256);
    journal.answer(&ready(TransactionStatus::Idle)).unwrap();
    assert!(!journal.is_full(), "the client continues when a unit was answered");
}

#[test]
fn a_front_keeps_a_bounded_size_of_requests() {
    // Without Sync, the unnamed statement is replaced again and again.
    let mut journal = journal();
    let large = parse("", &"x".repeat(300 << 10));
    for _ in 0..20 {
        journal.feed(&large).unwrap();
    }
    assert!(journal.is_lost);
    assert!(journal.kept_bytes() <= 1 << 20, "{} bytes are kept", journal.kept_bytes());
    // A statement beyond the limit is forgotten, rather than restored with another text.
    let late = parse("late", &"y".repeat(300 << 10));
    journal.feed(&[&late[..], &sync()].concat()).unwrap();
    let parsed = message(b'1', b"").repeat(21);
    journal.answer(&[parsed, ready(TransactionStatus::Idle)].concat()).unwrap();
    journal.unsent.clear();
    journal.begin_again();
    let restored = sent(&mut journal);
    assert!(!restored.windows(4).any(|bytes| bytes == b"late"), "{} bytes", restored.len());
}

#[test]
fn unanswered_units_hold_a_bounded_size() {
    let mut journal = journal();
    let unit = [parse("", &"x".repeat(900 << 10)), sync()].concat();
    let left = loop {
        let count = journal.feed(&unit).unwrap();
        journal.unsent.clear();
        assert!(journal.kept_bytes() <= 4 << 20, "{} bytes are kept", journal.kept_bytes());
        assert!(journal.held_bytes() <= 4 << 20, "{} bytes are held", journal.held_bytes());
        if count < unit.len() {
            break &unit[count..];
        }
    };
    assert!(journal.is_full());
    assert_eq!(journal.feed(left), Ok(0), "the client's messages must wait");
    journal.answer(&[message(b'1', b""), ready(TransactionStatus::Idle)].concat()).unwrap();
    assert_eq!(journal.feed(left), Ok(left.len()), "the client continues when a unit was answered");
}

#[test]
fn a_unit_holds_a_bounded_size_of_requests_and_portals() {
    const CLOSES: usize = 100_000;
    let mut journal = journal();
    journal.feed(&[parse("old", "SELECT 1"), sync()].concat()).unwrap();
    journal.answer(&[message(b'1', b""), ready(TransactionStatus::Idle)].concat()).unwrap();
    journal.feed(&message(b'C', b"Sother\0").repeat(CLOSES)).unwrap();
    for number in 0..9 {
        journal.feed(&bind(&format!("{number}{}", "p".repeat(500 << 10)), "old")).unwrap();
    }
    journal.unsent.clear();
    assert!(journal.held_bytes() <= 2 << 20, "{} bytes are held", journal.held_bytes());
    // The unit may have prepared any statement, with any text.
    journal.feed(&[bind("", "old"), execute(), sync()].concat()).unwrap();
    assert!(journal.units[0].ends_transaction);
    let closed = message(b'3', b"").repeat(CLOSES);
    journal.answer(&[closed, ready(TransactionStatus::Idle)].concat()).unwrap();
    journal.begin_again();
    assert_eq!(sent(&mut journal), b"", "a statement that may have changed must not be restored");
}

#[test]
fn a_commit_without_its_messages_cannot_be_answered() {
    let extended = [parse("", "COMMIT"), bind("", ""), execute(), sync()].concat();
    for (request, is_answerable) in [(query("COMMIT"), true), (extended, false)] {
        let mut journal = journal();
        journal.feed(&request).unwrap();
        assert!(journal.units[0].is_answerable_commit());
        journal.give_up();
        assert_eq!(journal.units[0].is_answerable_commit(), is_answerable);
    }
}

#[test]
fn a_front_knows_a_bounded_number_of_portals() {
    let mut journal = journal();
    journal.feed(&[parse("c", "COMMIT"), sync()].concat()).unwrap();
    journal.answer(&[message(b'1', b""), ready(TransactionStatus::Idle)].concat()).unwrap();
    // Portals beyond the limit may be anything: the unit is not repeated.
    for (count, is_commit) in [(63, true), (64, false)] {
        let binds: Vec<u8> = (0..count).flat_map(|number| bind(&format!("p{number}"), "c")).collect();
        journal.feed(&[&bind("", "c"), &binds[..], &execute(), &sync()].concat()).unwrap();
        assert_eq!(journal.units[0].is_commit, is_commit, "{count} other portals");
        journal.answer(&ready(TransactionStatus::Idle)).unwrap();
    }
}

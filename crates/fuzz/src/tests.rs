//! The fuzzer finds known faults, and is deterministic.

use super::*;

fn target() -> Target {
    Target::new("self", env!("CARGO_MANIFEST_DIR")).seeds(["seed"]).words(&["magic"])
}

fn panics(target: Target, call: impl FnMut(&[u8])) -> bool {
    catch_unwind(AssertUnwindSafe(|| target.run(call))).is_err()
}

#[test]
fn finds_a_panic() {
    assert!(panics(target(), |input| assert!(!input.windows(5).any(|window| window == b"magic"))));
    assert!(!panics(target(), |_| ()));
}

#[test]
fn finds_an_excessive_allocation() {
    let allocates_claimed = |input: &[u8]| {
        let claimed = u32::from_be_bytes(*input.first_chunk().unwrap_or(&[0; 4]));
        std::hint::black_box(Vec::<u8>::with_capacity(claimed as usize));
    };
    assert!(panics(target(), allocates_claimed));
    assert!(!panics(target().max_allocation(5 << 30, 0), allocates_claimed));
}

#[test]
fn runs_are_deterministic() {
    let inputs = || {
        let mut inputs = Vec::new();
        target().runs(500).max_allocation(1 << 20, 1 << 20).run(|input| inputs.push(input.to_vec()));
        inputs
    };
    let first = inputs();
    assert_eq!(first, inputs());
    assert!(first.len() == 500 && first.iter().any(Vec::is_empty));
}

#[test]
fn choices_are_zero_after_the_last_byte() {
    let mut choices = Choices::new(&[3, 1, 44, 9]);
    assert_eq!((choices.below(2), choices.below(300)), (1, 0));
    assert_eq!(choices.one_of(&["a", "b"]), "b");
    assert_eq!((choices.byte(), choices.is_empty(), choices.bytes(4)), (0, true, &[][..]));
}

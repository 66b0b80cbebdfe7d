//! Mutation: derives new inputs from the corpus.

use rand::RngExt;
use rand::rngs::StdRng;

use crate::corpus::Corpus;

/// Boundary values of integer types.
const BOUNDARIES: [u64; 16] = [
    0,
    1,
    0x7f,
    0x80,
    0xff,
    0x7fff,
    0x8000,
    0xffff,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    1 << 32,
    1 << 53,
    i64::MAX as u64,
    i64::MIN as u64,
    u64::MAX,
];

/// Copies an input of the corpus and changes it in 1 to 8 places.
pub(crate) fn mutate(corpus: &Corpus, words: &[&str], longest_bytes: usize, random: &mut StdRng) -> Vec<u8> {
    let mut input = corpus.choose(random).to_vec();
    for _ in 0..1 << random.random_range(0..4) {
        change(&mut input, corpus, words, random);
        input.truncate(longest_bytes);
    }
    input
}

fn change(input: &mut Vec<u8>, corpus: &Corpus, words: &[&str], random: &mut StdRng) {
    let at = random.random_range(0..=input.len());
    match random.random_range(0..10) {
        0 if at < input.len() => input[at] ^= 1 << random.random_range(0..8),
        1 if at < input.len() => input[at] = random.random(),
        2 => input.insert(at, random.random()),
        3 => drop(input.drain(piece(input.len(), random))),
        4 => number(&mut input[at..], random),
        5 | 6 if !words.is_empty() => {
            let word = words[random.random_range(0..words.len())].as_bytes();
            put(input, at, word, random);
        }
        7 => {
            let other = corpus.choose(random);
            let piece = other[piece(other.len(), random)].to_vec();
            put(input, at, &piece, random);
        }
        8 => {
            let repeated = input[piece(input.len(), random)].to_vec();
            input.splice(at..at, repeated);
        }
        9 if random.random_range(0..8) == 0 => input.truncate(at),
        _ => {
            for byte in &mut input[at..] {
                *byte = byte.wrapping_add(random.random_range(0..3));
                if random.random_range(0..4) == 0 {
                    break;
                }
            }
        }
    }
}

/// A random range. Short ones are more likely than long ones.
fn piece(length: usize, random: &mut StdRng) -> std::ops::Range<usize> {
    let start = random.random_range(0..=length);
    let longest = (length - start).min(1 << random.random_range(0..12));
    start..start + random.random_range(0..=longest)
}

/// Inserts bytes, or overwrites existing ones.
fn put(input: &mut Vec<u8>, at: usize, bytes: &[u8], random: &mut StdRng) {
    let replaced = if random.random() { (at + bytes.len()).min(input.len()) } else { at };
    input.splice(at..replaced, bytes.iter().copied());
}

/// Writes a number of one to eight bytes in either byte order: a boundary value, or the existing
/// number plus or minus up to 4.
fn number(bytes: &mut [u8], random: &mut StdRng) {
    let width = 1usize << random.random_range(0..4);
    let Some(place) = bytes.get_mut(..width) else { return };
    let big = random.random();
    if big {
        place.reverse();
    }
    let mut old = [0; 8];
    old[..width].copy_from_slice(place);
    let value = match random.random() {
        true => BOUNDARIES[random.random_range(0..BOUNDARIES.len())],
        false => u64::from_le_bytes(old).wrapping_add(random.random_range(0..9)).wrapping_sub(4),
    };
    place.copy_from_slice(&value.to_le_bytes()[..width]);
    if big {
        place.reverse();
    }
}

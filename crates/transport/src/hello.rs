//! The handshake: both sides identify themselves, and refuse a wrong peer.
//!
//! ```text
//!   dialing node                             accepting node
//!   Hello (and whom it expects)  ----->      checks it
//!   checks it                    <-----      Hello, or Goodbye with the reason
//! ```
//!
//! The payload of a Hello frame:
//!
//! ```text
//!   offset  bytes                                  (numbers are little-endian)
//!        0      8  "fulmar-n"
//!        8      2  lowest protocol version
//!       10      2  highest protocol version
//!       12     16  cluster
//!       28      4  node
//!       32      8  incarnation
//!       40      4  the node that the sender expects to talk to; 0 for any
//!       44    ...  ignored: reserved for later versions
//! ```
//!
//! Neighbouring versions of Fulmar have a common protocol version, so that a cluster can be
//! upgraded node by node. Both sides use the highest common one.

use std::ops::RangeInclusive;

use bytes::{Buf, BufMut, BytesMut};

use crate::Error;

const MAGIC: &[u8; 8] = b"fulmar-n";
const PAYLOAD_BYTES: usize = 44;

/// The protocol versions that this build speaks.
pub const VERSIONS: RangeInclusive<u16> = 1..=1;

/// Stands for a node that only uses the metadata store of the accepting node. It may not have an id
/// yet, and not know its cluster, which is 0 then.
pub const METADATA_CLIENT: u32 = u32::MAX;

/// What a node states about itself.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Identity {
    /// The cluster that the node belongs to.
    pub cluster: u128,
    /// The node. Never 0.
    pub node: u32,
    /// The incarnation of the node's process.
    pub incarnation: u64,
    /// The protocol versions that it speaks.
    pub versions: RangeInclusive<u16>,
}

/// Returns the payload of a Hello frame.
pub(crate) fn encode(identity: &Identity, expected: Option<u32>) -> BytesMut {
    let mut payload = BytesMut::with_capacity(PAYLOAD_BYTES);
    payload.put_slice(MAGIC);
    payload.put_u16_le(*identity.versions.start());
    payload.put_u16_le(*identity.versions.end());
    payload.put_u128_le(identity.cluster);
    payload.put_u32_le(identity.node);
    payload.put_u64_le(identity.incarnation);
    payload.put_u32_le(expected.unwrap_or(0));
    payload
}

/// Reads a Hello frame: the peer, and the node that it expects.
pub(crate) fn decode(mut payload: &[u8]) -> Result<(Identity, Option<u32>), Error> {
    if payload.len() < PAYLOAD_BYTES || !payload.starts_with(MAGIC) {
        return Err(Error::Protocol("the peer is not a Fulmar node"));
    }
    payload.advance(MAGIC.len());
    let (lowest, highest) = (payload.get_u16_le(), payload.get_u16_le());
    let cluster = payload.get_u128_le();
    let node = payload.get_u32_le();
    let incarnation = payload.get_u64_le();
    let expected = payload.get_u32_le();
    if node == 0 || lowest > highest {
        return Err(Error::Protocol("invalid identity"));
    }
    let identity = Identity { cluster, node, incarnation, versions: lowest..=highest };
    Ok((identity, (expected != 0).then_some(expected)))
}

/// Checks a peer. Returns the protocol version to use, or the reason for which it is refused.
pub(crate) fn check(own: &Identity, peer: &Identity, peer_expects: Option<u32>) -> Result<u16, String> {
    let joins = |one: &Identity| one.node == METADATA_CLIENT && one.cluster == 0;
    if peer.cluster != own.cluster && !joins(own) && !joins(peer) {
        return Err(format!(
            "node {} belongs to cluster {:032x}, node {} to cluster {:032x}; check the addresses of \
             the nodes, or start the node with the metadata store of its own cluster",
            peer.node, peer.cluster, own.node, own.cluster
        ));
    }
    if let Some(expected) = peer_expects.filter(|expected| *expected != own.node) {
        return Err(format!(
            "this address belongs to node {}, not to node {expected}; the address of one of them has \
             changed, and the caller uses an old one",
            own.node
        ));
    }
    let version = *own.versions.end().min(peer.versions.end());
    if version < *own.versions.start().max(peer.versions.start()) {
        return Err(format!(
            "node {} speaks protocol versions {} to {}, node {} speaks {} to {}; upgrade the older one \
             to a neighbouring version first",
            peer.node,
            peer.versions.start(),
            peer.versions.end(),
            own.node,
            own.versions.start(),
            own.versions.end()
        ));
    }
    Ok(version)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(node: u32, cluster: u128, versions: RangeInclusive<u16>) -> Identity {
        Identity { cluster, node, incarnation: 7, versions }
    }

    #[test]
    fn identities_are_decoded_as_encoded() {
        let sent = node(3, u128::MAX - 5, 2..=4);
        assert_eq!(decode(&encode(&sent, Some(9))).unwrap(), (sent.clone(), Some(9)));
        assert_eq!(decode(&encode(&sent, None)).unwrap(), (sent.clone(), None));
        let mut longer = encode(&sent, None);
        longer.put_slice(b"a later version");
        assert_eq!(decode(&longer).unwrap().0, sent);
        for cut in 0..PAYLOAD_BYTES {
            assert!(decode(&encode(&sent, None)[..cut]).is_err());
        }
        assert!(decode(&encode(&node(0, 1, 1..=1), None)).is_err());
    }

    #[test]
    fn the_highest_common_version_is_used() {
        let versions = |own, peer| check(&node(1, 5, own), &node(2, 5, peer), Some(1));
        assert_eq!(versions(1..=3, 2..=5), Ok(3));
        assert_eq!(versions(2..=5, 1..=2), Ok(2));
        assert!(versions(3..=5, 1..=2).unwrap_err().contains("upgrade"));
        assert!(versions(1..=1, 2..=2).unwrap_err().contains("upgrade"));
    }

    #[test]
    fn other_clusters_and_wrong_nodes_are_refused() {
        let own = node(1, 5, 1..=1);
        assert!(check(&own, &node(2, 6, 1..=1), None).unwrap_err().contains("cluster"));
        assert!(check(&own, &node(2, 5, 1..=1), Some(3)).unwrap_err().contains("not to node 3"));
        assert_eq!(check(&own, &node(2, 5, 1..=1), None), Ok(1));
        // A node that joins a cluster does not know it yet. Later it expects the same one.
        let joins = |cluster| node(METADATA_CLIENT, cluster, 1..=1);
        assert_eq!((check(&own, &joins(0), None), check(&joins(0), &own, None)), (Ok(1), Ok(1)));
        assert!(check(&joins(6), &own, None).unwrap_err().contains("cluster"));
        assert!(check(&own, &node(2, 0, 1..=1), None).unwrap_err().contains("cluster"));
    }
}

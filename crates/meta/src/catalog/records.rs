//! Encodes and decodes the catalog's keys and values. The crate documentation describes them.

use std::collections::BTreeMap;
use std::fmt;

use fulmar_pages::{Durability, PartitionId};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::types::Grant;
use super::{Access, PartitionRecord, SaltKey, ScramVerifier, SecretHash, Tenant, TenantState, Token, User};
use crate::{Entry, Limit, Limits, MetaError, Revision};

/// The format version of every value.
const VERSION: u32 = 1;

/// A key of the catalog.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Key<'a> {
    Tenant(&'a str),
    Partition(PartitionId),
    User(&'a str),
    Grant(PartitionId, &'a str),
    Token(&'a str),
    PartitionCounter,
    Dropped(PartitionId),
    DroppedCounter,
    Salt,
}

impl fmt::Display for Key<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Key::Tenant(name) => write!(f, "tenant/{name}"),
            Key::Partition(id) => write!(f, "partition/{:016x}", id.0),
            Key::User(name) => write!(f, "user/{name}"),
            Key::Grant(id, user) => write!(f, "grant/{:016x}/{user}", id.0),
            Key::Token(name) => write!(f, "token/{name}"),
            Key::PartitionCounter => f.write_str("counter/partition"),
            Key::Dropped(id) => write!(f, "dropped/{:016x}", id.0),
            Key::DroppedCounter => f.write_str("counter/dropped"),
            Key::Salt => f.write_str("secret/salt"),
        }
    }
}

impl<'a> Key<'a> {
    /// Parses a key of the store. `None` if it does not belong to the catalog.
    pub(super) fn parse(key: &'a str) -> Result<Option<Key<'a>>, MetaError> {
        let bad = || corrupt(key, "invalid partition id in the key");
        let Some((kind, rest)) = key.split_once('/') else {
            return Ok(None);
        };
        Ok(Some(match kind {
            "tenant" => Key::Tenant(rest),
            "user" => Key::User(rest),
            "token" => Key::Token(rest),
            "partition" => Key::Partition(partition_id(rest).ok_or_else(bad)?),
            "grant" => {
                let (id, user) = rest.split_once('/').ok_or_else(bad)?;
                Key::Grant(partition_id(id).ok_or_else(bad)?, user)
            }
            "counter" if rest == "partition" => Key::PartitionCounter,
            "counter" if rest == "dropped" => Key::DroppedCounter,
            "dropped" => Key::Dropped(partition_id(rest).ok_or_else(bad)?),
            "secret" if rest == "salt" => Key::Salt,
            _ => return Ok(None),
        }))
    }
}

/// Parses an id exactly as `Key` formats it, so that no two keys have the same meaning.
fn partition_id(digits: &str) -> Option<PartitionId> {
    let lower_hex = digits.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    if digits.len() != 16 || !lower_hex {
        return None;
    }
    u64::from_str_radix(digits, 16).ok().map(PartitionId)
}

#[derive(Serialize, Deserialize)]
struct Versioned<T> {
    v: u32,
    #[serde(flatten)]
    record: T,
}

/// Decoded first, because other versions may have different fields.
#[derive(Deserialize)]
struct VersionOnly {
    v: u32,
}

#[derive(Serialize, Deserialize)]
struct TenantValue {
    partition: u64,
    owner: String,
    created_unix_ms: u64,
    state: TenantState,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    limits: BTreeMap<String, u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    durability: Option<String>,
}

#[derive(Serialize, Deserialize)]
struct PartitionValue {
    lineage: u64,
    epoch: u32,
}

#[derive(Serialize, Deserialize)]
struct UserValue {
    superuser: bool,
    leaving: bool,
    verifier: Option<VerifierValue>,
}

#[derive(Serialize, Deserialize)]
struct VerifierValue {
    iterations: u32,
    salt: HexBytes,
    stored_key: HexBytes,
    server_key: HexBytes,
}

#[derive(Serialize, Deserialize)]
struct GrantValue {
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    read_only: bool,
}

#[derive(Serialize, Deserialize)]
struct TokenValue {
    hash: HexBytes,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    partition: Option<u64>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    admin: bool,
    created_unix_ms: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    expires_unix_ms: Option<u64>,
}

#[derive(Serialize, Deserialize)]
struct CounterValue {
    next: u64,
}

#[derive(Serialize, Deserialize)]
struct DroppedValue {}

#[derive(Serialize, Deserialize)]
struct DroppedCounterValue {
    before: u64,
}

#[derive(Serialize, Deserialize)]
struct SaltKeyValue {
    key: HexBytes,
}

/// Bytes that are encoded as hexadecimal digits.
#[derive(Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
struct HexBytes(Vec<u8>);

impl From<HexBytes> for String {
    fn from(bytes: HexBytes) -> Self {
        bytes.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

impl TryFrom<String> for HexBytes {
    type Error = &'static str;

    fn try_from(digits: String) -> Result<Self, Self::Error> {
        let digit = |byte: u8| char::from(byte).to_digit(16);
        let pairs = digits.as_bytes().chunks(2).map(|pair| match *pair {
            [high, low] => u8::try_from(digit(high)? * 16 + digit(low)?).ok(),
            _ => None,
        });
        pairs.collect::<Option<Vec<u8>>>().map(HexBytes).ok_or("expected pairs of hexadecimal digits")
    }
}

impl Clone for HexBytes {
    fn clone(&self) -> Self {
        HexBytes(self.0.clone())
    }
}

pub(super) fn tenant_value(tenant: &Tenant) -> Vec<u8> {
    encode(TenantValue {
        partition: tenant.partition.0,
        owner: tenant.owner.clone(),
        created_unix_ms: tenant.created_unix_ms,
        state: tenant.state,
        limits: tenant.limits.iter_set().map(|(limit, value)| (limit.name().to_owned(), value)).collect(),
        durability: Some(tenant.durability)
            .filter(|durability| *durability != Durability::default())
            .map(|durability| durability.name().to_owned()),
    })
}

pub(super) fn tenant(name: &str, entry: &Entry) -> Result<Tenant, MetaError> {
    let value: TenantValue = decode(entry)?;
    Ok(Tenant {
        name: name.to_owned(),
        partition: PartitionId(value.partition),
        owner: value.owner,
        created_unix_ms: value.created_unix_ms,
        state: value.state,
        limits: limits(&value.limits, entry)?,
        durability: durability(value.durability.as_deref(), entry)?,
        revision: entry.modified,
    })
}

fn durability(name: Option<&str>, entry: &Entry) -> Result<Durability, MetaError> {
    let Some(name) = name else { return Ok(Durability::default()) };
    let unknown = || corrupt(&entry.key, &format!("unknown durability \"{name}\""));
    Durability::from_name(name).ok_or_else(unknown)
}

fn limits(values: &BTreeMap<String, u64>, entry: &Entry) -> Result<Limits, MetaError> {
    let mut limits = Limits::default();
    for (name, value) in values {
        let limit = Limit::find(name).map_err(|unknown| corrupt(&entry.key, &unknown.to_string()))?;
        if !limit.allows(*value) {
            return Err(corrupt(&entry.key, &format!("invalid value for limit \"{name}\": {value}")));
        }
        limits.set(limit, Some(*value));
    }
    Ok(limits)
}

pub(super) fn partition_value(partition: &PartitionRecord) -> Vec<u8> {
    encode(PartitionValue { lineage: partition.lineage, epoch: partition.epoch })
}

pub(super) fn partition(id: PartitionId, entry: &Entry) -> Result<PartitionRecord, MetaError> {
    let value: PartitionValue = decode(entry)?;
    Ok(PartitionRecord { id, lineage: value.lineage, epoch: value.epoch, revision: entry.modified })
}

pub(super) fn user_value(user: &User) -> Vec<u8> {
    let verifier = user.verifier.as_ref().map(|verifier| VerifierValue {
        iterations: verifier.iterations,
        salt: HexBytes(verifier.salt.clone()),
        stored_key: HexBytes(verifier.stored_key.clone()),
        server_key: HexBytes(verifier.server_key.clone()),
    });
    encode(UserValue { superuser: user.superuser, leaving: user.leaving, verifier })
}

pub(super) fn user(name: &str, entry: &Entry) -> Result<User, MetaError> {
    let value: UserValue = decode(entry)?;
    let verifier = value.verifier.map(|verifier| ScramVerifier {
        salt: verifier.salt.0,
        iterations: verifier.iterations,
        stored_key: verifier.stored_key.0,
        server_key: verifier.server_key.0,
    });
    Ok(User {
        name: name.to_owned(),
        superuser: value.superuser,
        verifier,
        leaving: value.leaving,
        revision: entry.modified,
    })
}

pub(super) fn grant_value(access: Access) -> Vec<u8> {
    encode(GrantValue { read_only: access == Access::ReadOnly })
}

pub(super) fn grant(entry: &Entry) -> Result<Grant, MetaError> {
    let GrantValue { read_only } = decode(entry)?;
    let access = if read_only { Access::ReadOnly } else { Access::ReadWrite };
    Ok(Grant { access, revision: entry.modified })
}

pub(super) fn token_value(token: &Token) -> Vec<u8> {
    encode(TokenValue {
        hash: HexBytes(token.hash.0.clone()),
        partition: token.partition.map(|partition| partition.0),
        admin: token.is_admin,
        created_unix_ms: token.created_unix_ms,
        expires_unix_ms: token.expires_unix_ms,
    })
}

pub(super) fn token(name: &str, entry: &Entry) -> Result<Token, MetaError> {
    let value: TokenValue = decode(entry)?;
    Ok(Token {
        name: name.to_owned(),
        hash: SecretHash(value.hash.0),
        partition: value.partition.map(PartitionId),
        is_admin: value.admin,
        created_unix_ms: value.created_unix_ms,
        expires_unix_ms: value.expires_unix_ms,
        revision: entry.modified,
    })
}

pub(super) fn counter_value(next: u64) -> Vec<u8> {
    encode(CounterValue { next })
}

pub(super) fn counter(entry: &Entry) -> Result<(u64, Revision), MetaError> {
    Ok((decode::<CounterValue>(entry)?.next, entry.modified))
}

pub(super) fn dropped_value() -> Vec<u8> {
    encode(DroppedValue {})
}

pub(super) fn check_dropped(entry: &Entry) -> Result<(), MetaError> {
    decode::<DroppedValue>(entry).map(drop)
}

pub(super) fn dropped_counter_value(before: u64) -> Vec<u8> {
    encode(DroppedCounterValue { before })
}

pub(super) fn dropped_counter(entry: &Entry) -> Result<(u64, Revision), MetaError> {
    Ok((decode::<DroppedCounterValue>(entry)?.before, entry.modified))
}

pub(super) fn salt_key_value(key: &SaltKey) -> Vec<u8> {
    encode(SaltKeyValue { key: HexBytes(key.0.clone()) })
}

pub(super) fn salt_key(entry: &Entry) -> Result<SaltKey, MetaError> {
    Ok(SaltKey(decode::<SaltKeyValue>(entry)?.key.0))
}

fn encode<T: Serialize>(record: T) -> Vec<u8> {
    // Plain structs of numbers, strings and booleans, which JSON can always represent.
    serde_json::to_vec(&Versioned { v: VERSION, record }).expect("catalog records must be valid JSON")
}

fn decode<T: DeserializeOwned>(entry: &Entry) -> Result<T, MetaError> {
    let VersionOnly { v } =
        serde_json::from_slice(&entry.value).map_err(|error| corrupt(&entry.key, &error.to_string()))?;
    if v != VERSION {
        return Err(corrupt(&entry.key, &format!("unsupported format version {v} (supported: {VERSION})")));
    }
    serde_json::from_slice(&entry.value).map_err(|error| corrupt(&entry.key, &error.to_string()))
}

pub(super) fn corrupt(key: &str, cause: &str) -> MetaError {
    MetaError::Corrupt { place: format!("record \"{}\"", key.escape_debug()), cause: cause.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(key: Key<'_>, value: Vec<u8>) -> Entry {
        Entry { key: key.to_string(), value, modified: Revision(7) }
    }

    #[test]
    fn key_round_trips() {
        for key in [
            Key::Tenant("a/b \"c\""),
            Key::User("tenant/x"),
            Key::Partition(PartitionId(u64::MAX)),
            Key::Grant(PartitionId(0xab), "o/'hara"),
            Key::Token("a/b"),
            Key::PartitionCounter,
            Key::Dropped(PartitionId(7)),
            Key::DroppedCounter,
            Key::Salt,
        ] {
            assert_eq!(Key::parse(&key.to_string()), Ok(Some(key)));
        }
    }

    #[test]
    fn foreign_key_is_ignored_and_malformed_key_is_rejected() {
        assert_eq!(Key::parse("lease/7"), Ok(None));
        assert_eq!(Key::parse("tenant"), Ok(None));
        for key in [
            "partition/12",
            "partition/00000000000000AB",
            "grant/00000000000000ab",
            "partition/+000000000000001",
            "dropped/1",
        ] {
            assert!(matches!(Key::parse(key), Err(MetaError::Corrupt { .. })), "{key}");
        }
    }

    #[test]
    fn encoding_is_as_documented() {
        let mut tenant = Tenant {
            name: "ada".to_owned(),
            partition: PartitionId(2),
            owner: "fulmar".to_owned(),
            created_unix_ms: 1_790_000_000_000,
            state: TenantState::Creating,
            limits: Limits::default(),
            durability: Durability::Local,
            revision: Revision(7),
        };
        let value = tenant_value(&tenant);
        assert_eq!(
            String::from_utf8_lossy(&value),
            r#"{"v":1,"partition":2,"owner":"fulmar","created_unix_ms":1790000000000,"state":"creating"}"#
        );
        // The same encoding as before limits were introduced.
        assert_eq!(super::tenant("ada", &entry(Key::Tenant("ada"), value)), Ok(tenant.clone()));
        tenant.limits.set(Limit::MaxSize, Some(65_536));
        tenant.limits.set(Limit::MaxConnections, Some(10));
        let value = tenant_value(&tenant);
        assert_eq!(
            String::from_utf8_lossy(&value),
            concat!(
                r#"{"v":1,"partition":2,"owner":"fulmar","created_unix_ms":1790000000000,"state":"creating","#,
                r#""limits":{"max_connections":10,"max_size":65536}}"#
            )
        );
        assert_eq!(super::tenant("ada", &entry(Key::Tenant("ada"), value)), Ok(tenant.clone()));
        tenant.limits = Limits::default();
        tenant.durability = Durability::Shared;
        let value = tenant_value(&tenant);
        assert!(value.ends_with(br#""state":"creating","durability":"shared"}"#));
        assert_eq!(super::tenant("ada", &entry(Key::Tenant("ada"), value)), Ok(tenant));

        let user = User {
            name: "ada".to_owned(),
            superuser: true,
            verifier: Some(ScramVerifier {
                salt: vec![0, 0x1f],
                iterations: 4096,
                stored_key: vec![0xff],
                server_key: vec![],
            }),
            leaving: false,
            revision: Revision(7),
        };
        let value = user_value(&user);
        assert_eq!(
            String::from_utf8_lossy(&value),
            concat!(
                r#"{"v":1,"superuser":true,"leaving":false,"verifier":"#,
                r#"{"iterations":4096,"salt":"001f","stored_key":"ff","server_key":""}}"#
            )
        );
        assert_eq!(super::user("ada", &entry(Key::User("ada"), value)), Ok(user));
        for (access, written) in
            [(Access::ReadWrite, r#"{"v":1}"#), (Access::ReadOnly, r#"{"v":1,"read_only":true}"#)]
        {
            let value = grant_value(access);
            assert_eq!(String::from_utf8_lossy(&value), written);
            let key = Key::Grant(PartitionId(2), "ada");
            assert_eq!(grant(&entry(key, value)), Ok(Grant { access, revision: Revision(7) }));
        }
        for (partition, is_admin, expires_unix_ms, written) in [
            (None, false, None, r#"{"v":1,"hash":"00ff","created_unix_ms":1}"#),
            (None, true, None, r#"{"v":1,"hash":"00ff","admin":true,"created_unix_ms":1}"#),
            (
                Some(PartitionId(2)),
                false,
                Some(9),
                r#"{"v":1,"hash":"00ff","partition":2,"created_unix_ms":1,"expires_unix_ms":9}"#,
            ),
        ] {
            let token = Token {
                name: "scraper".to_owned(),
                hash: SecretHash(vec![0, 0xff]),
                partition,
                is_admin,
                created_unix_ms: 1,
                expires_unix_ms,
                revision: Revision(7),
            };
            let value = token_value(&token);
            assert_eq!(String::from_utf8_lossy(&value), written);
            assert_eq!(super::token("scraper", &entry(Key::Token("scraper"), value)), Ok(token));
        }
        let value = dropped_value();
        assert_eq!(String::from_utf8_lossy(&value), r#"{"v":1}"#);
        check_dropped(&entry(Key::Dropped(PartitionId(7)), value)).unwrap();
        let value = dropped_counter_value(66);
        assert_eq!(String::from_utf8_lossy(&value), r#"{"v":1,"before":66}"#);
        assert_eq!(dropped_counter(&entry(Key::DroppedCounter, value)), Ok((66, Revision(7))));
        let value = salt_key_value(&SaltKey(vec![1, 0xfe]));
        assert_eq!(String::from_utf8_lossy(&value), r#"{"v":1,"key":"01fe"}"#);
        assert_eq!(salt_key(&entry(Key::Salt, value)), Ok(SaltKey(vec![1, 0xfe])));
    }

    #[test]
    fn other_versions_and_damage_are_rejected() {
        let rejected =
            |value: &str| counter(&entry(Key::PartitionCounter, value.as_bytes().to_vec())).unwrap_err();
        assert!(rejected(r#"{"v":2,"after":9}"#).to_string().contains("format version 2"));
        assert!(matches!(rejected(r#"{"next":9}"#), MetaError::Corrupt { .. }));
        assert!(matches!(rejected(r#"{"v":1,"next":-9}"#), MetaError::Corrupt { .. }));
        assert!(matches!(rejected("\0"), MetaError::Corrupt { .. }));
        let tenant = |limits: &str| {
            let value = format!(
                r#"{{"v":1,"partition":2,"owner":"a","created_unix_ms":1,"state":"ready","limits":{limits}}}"#
            );
            super::tenant("ada", &entry(Key::Tenant("ada"), value.into_bytes()))
        };
        assert!(tenant(r#"{"cpu_share":10000}"#).is_ok());
        for limits in [r#"{"cpu_share":10001}"#, r#"{"of_later":1}"#, "7"] {
            assert!(matches!(tenant(limits), Err(MetaError::Corrupt { .. })), "{limits}");
        }
        for digits in ["0", "0g", "é0"] {
            assert!(HexBytes::try_from(digits.to_owned()).is_err(), "{digits}");
        }
    }
}

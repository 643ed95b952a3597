//! Which global ranks a communicator of a training process has.
//!
//! NCCL tells a process only a size, its own group rank and 128 opaque bytes. The bytes travel through the rendezvous
//! store under a key that torch builds from the process group's name (`ProcessGroupNCCL`, `broadcastUniqueNCCLID`):
//! `default_pg/0//cuda//0` for the default group, `default_pg/0//<group>//cuda//<key>` for others, where `<key>` is a
//! counter, `UniqueNCCLID:<root>` (scalable initialisation), or `<lo>:<hi>` for the two-member communicator of a send/recv
//! pair. The framework hook tells the members of every group by name.

use prism_wire::control::{UNIQUE_ID_BYTES, UNIQUE_ID_LOCAL_MAGIC, UNIQUE_ID_STORE_MAGIC};
use std::collections::BTreeMap;

/// 128 bytes of an NCCL unique id.
pub type UniqueId = [u8; UNIQUE_ID_BYTES];

const KEY_MARK: &str = "cuda//";
const KEY_OFFSET: usize = 16;

/// What a store key of an NCCL id says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommKey {
    /// Name of the process group, empty for the default group.
    pub group: String,
    /// `Some((lo, hi))` for the communicator of a send/recv pair (group ranks).
    pub pair: Option<(u32, u32)>,
}

/// Parses a store key; `None` when it is not the key of an NCCL id.
#[must_use]
pub fn parse_key(key: &str) -> Option<CommKey> {
    let position = key.rfind(KEY_MARK)?;
    let (prefix, suffix) = (&key[..position], &key[position + KEY_MARK.len()..]);
    let prefix = prefix.trim_end_matches('/');
    // The default group's own prefix is `default_pg/0`; a sub-group's name follows it after `//`.
    let group = match prefix.find("//") {
        Some(at) => prefix[at..].trim_matches('/'),
        None if prefix == "default_pg/0" || prefix.is_empty() => "",
        None => prefix,
    };
    let pair = suffix.split_once(':').and_then(|(lo, hi)| Some((lo.parse().ok()?, hi.parse().ok()?)));
    Some(CommKey { group: group.to_owned(), pair })
}

/// Ids learned from the store, and ids made up for absent roots.
#[derive(Debug, Default)]
pub struct IdentityTable {
    canonical: BTreeMap<String, UniqueId>,
    key_of_local: BTreeMap<UniqueId, String>,
}

impl IdentityTable {
    /// A live rank sets `key`. Ids are replaced by the canonical id of the key, so that every rank sees the same one
    /// whether the root runs or not; other values stay as they are.
    pub fn store_set(&mut self, key: &str, value: &[u8]) -> Vec<u8> {
        let Ok(id) = UniqueId::try_from(value) else { return value.to_vec() };
        if !id.starts_with(UNIQUE_ID_LOCAL_MAGIC) || parse_key(key).is_none() {
            return value.to_vec();
        }
        self.key_of_local.insert(id, key.to_owned());
        self.canonical_id(key).to_vec()
    }

    /// The value an absent rank would have set under `key`, if that is an NCCL id.
    pub fn absent_value(&mut self, key: &str) -> Option<Vec<u8>> {
        parse_key(key)?;
        Some(self.canonical_id(key).to_vec())
    }

    /// The store key an id belongs to; `None` for ids that did not travel through the store.
    #[must_use]
    pub fn key_of(&self, id: &UniqueId) -> Option<String> {
        if let Some(key) = self.key_of_local.get(id) {
            return Some(key.clone());
        }
        if !id.starts_with(UNIQUE_ID_STORE_MAGIC) {
            return None;
        }
        let known = self.canonical.iter().find(|(_, canonical)| *canonical == id).map(|(key, _)| key.clone());
        known.or_else(|| {
            let text = &id[KEY_OFFSET..];
            let end = text.iter().position(|byte| *byte == 0).unwrap_or(text.len());
            String::from_utf8(text[..end].to_vec()).ok()
        })
    }

    fn canonical_id(&mut self, key: &str) -> UniqueId {
        *self.canonical.entry(key.to_owned()).or_insert_with(|| make_store_id(key))
    }
}

fn make_store_id(key: &str) -> UniqueId {
    let mut id = [0; UNIQUE_ID_BYTES];
    id[..8].copy_from_slice(UNIQUE_ID_STORE_MAGIC);
    id[8..KEY_OFFSET].copy_from_slice(&fnv1a(key.as_bytes()).to_le_bytes());
    let length = key.len().min(UNIQUE_ID_BYTES - KEY_OFFSET);
    id[KEY_OFFSET..KEY_OFFSET + length].copy_from_slice(&key.as_bytes()[..length]);
    id
}

/// FNV-1a, 64 bit: tells long keys apart whose first 112 bytes are equal.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_name_group_and_pair() {
        let cases = [
            ("default_pg/0//cuda//0", "", None),
            ("default_pg/0//12//cuda//0", "12", None),
            ("default_pg/0//mesh_dp//cuda//UniqueNCCLID:3", "mesh_dp", None),
            ("default_pg/0//cuda//2:3", "", Some((2, 3))),
            ("default_pg/0//7//cuda//0:1", "7", Some((0, 1))),
        ];
        for (key, group, pair) in cases {
            assert_eq!(parse_key(key), Some(CommKey { group: group.into(), pair }), "{key}");
        }
        assert_eq!(parse_key("default_pg/0//worker_count"), None);
    }

    #[test]
    fn a_present_root_and_an_absent_one_give_the_same_id() {
        let key = "default_pg/0//12//cuda//0";
        let mut local = [7; UNIQUE_ID_BYTES];
        local[..8].copy_from_slice(UNIQUE_ID_LOCAL_MAGIC);
        let mut with_root = IdentityTable::default();
        let stored = with_root.store_set(key, &local);
        let mut without = IdentityTable::default();
        assert_eq!(stored, without.absent_value(key).expect("an NCCL key"));
        assert_eq!(with_root.key_of(&local).as_deref(), Some(key));
        assert_eq!(with_root.key_of(&stored.try_into().expect("128 bytes")).as_deref(), Some(key));
    }

    #[test]
    fn other_values_are_left_alone() {
        let mut table = IdentityTable::default();
        assert_eq!(table.store_set("default_pg/0//cuda//0", b"short"), b"short");
        assert_eq!(table.store_set("some/key", &[1; UNIQUE_ID_BYTES]), vec![1; UNIQUE_ID_BYTES]);
        assert_eq!(table.absent_value("default_pg/0//rank0"), None);
    }
}

//! The store of provider records: which peers take part in which run.
//!
//! The library's own store has at most twenty providers per key, and never removes expired ones, so
//! a full key accepts no new provider. It also lets any peer overwrite values. This store has more
//! providers, removes expired ones, and stores no values.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::iter;
use std::time::Instant;

use libp2p::PeerId;
use libp2p::kad::store::{Error, RecordStore, Result};
use libp2p::kad::{ProviderRecord, Record, RecordKey};

/// Maximum number of keys from other peers; they may be of runs unknown to this peer.
const KEYS: usize = 256;

/// Maximum number of providers of one key.
const PROVIDERS: usize = 256;

/// The providers of some keys.
pub(super) struct ProviderStore {
    own: PeerId,
    providers: BTreeMap<Vec<u8>, BTreeMap<PeerId, ProviderRecord>>,
}

impl ProviderStore {
    pub(super) fn new(own: PeerId) -> Self {
        Self { own, providers: BTreeMap::new() }
    }

    fn drop_expired(&mut self, now: Instant) {
        self.providers.retain(|_, providers| {
            providers.retain(|_, record| !record.is_expired(now));
            !providers.is_empty()
        });
    }
}

impl RecordStore for ProviderStore {
    type RecordsIter<'a> = iter::Empty<Cow<'a, Record>>;
    type ProvidedIter<'a> = std::vec::IntoIter<Cow<'a, ProviderRecord>>;

    fn get(&self, _key: &RecordKey) -> Option<Cow<'_, Record>> {
        None
    }

    fn put(&mut self, _record: Record) -> Result<()> {
        Err(Error::MaxRecords)
    }

    fn remove(&mut self, _key: &RecordKey) {}

    fn records(&self) -> Self::RecordsIter<'_> {
        iter::empty()
    }

    fn add_provider(&mut self, record: ProviderRecord) -> Result<()> {
        self.drop_expired(Instant::now());
        let key = record.key.to_vec();
        let ours = record.provider == self.own;
        if self.providers.len() >= KEYS && !self.providers.contains_key(&key) && !ours {
            return Err(Error::MaxProvidedKeys);
        }
        let providers = self.providers.entry(key).or_default();
        if providers.len() < PROVIDERS || providers.contains_key(&record.provider) || ours {
            providers.insert(record.provider, record);
        }
        Ok(())
    }

    fn providers(&self, key: &RecordKey) -> Vec<ProviderRecord> {
        let now = Instant::now();
        let providers = self.providers.get(&key.to_vec()).into_iter().flat_map(BTreeMap::values);
        providers.filter(|record| !record.is_expired(now)).cloned().collect()
    }

    fn provided(&self) -> Self::ProvidedIter<'_> {
        let ours = self.providers.values().filter_map(|providers| providers.get(&self.own));
        ours.map(Cow::Borrowed).collect::<Vec<_>>().into_iter()
    }

    fn remove_provider(&mut self, key: &RecordKey, provider: &PeerId) {
        if let Some(providers) = self.providers.get_mut(&key.to_vec()) {
            providers.remove(provider);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn record(key: &[u8], expires: Option<Instant>) -> ProviderRecord {
        let key = RecordKey::new(&key);
        ProviderRecord { key, provider: PeerId::random(), expires, addresses: Vec::new() }
    }

    #[test]
    fn expired_providers_are_replaced() {
        let mut store = ProviderStore::new(PeerId::random());
        let past = Instant::now().checked_sub(Duration::from_secs(1));
        for _ in 0..PROVIDERS {
            store.add_provider(record(b"run", past)).expect("taken");
        }
        assert!(store.providers(&RecordKey::new(b"run")).is_empty());
        let fresh = record(b"run", None);
        store.add_provider(fresh.clone()).expect("taken");
        assert_eq!(store.providers(&RecordKey::new(b"run")), [fresh]);
    }

    #[test]
    fn records_of_other_peers_are_limited() {
        let own = PeerId::random();
        let mut store = ProviderStore::new(own);
        for _ in 0..PROVIDERS + 10 {
            store.add_provider(record(b"run", None)).expect("ignored at worst");
        }
        assert_eq!(store.providers(&RecordKey::new(b"run")).len(), PROVIDERS);
        for key in 1..KEYS {
            store.add_provider(record(&key.to_le_bytes(), None)).expect("taken");
        }
        assert!(store.add_provider(record(b"one more", None)).is_err());
        // This peer's own records are always accepted.
        let ours = ProviderRecord { provider: own, ..record(b"ours", None) };
        store.add_provider(ours.clone()).expect("taken");
        assert_eq!(store.provided().map(Cow::into_owned).collect::<Vec<_>>(), [ours]);
    }

    #[test]
    fn values_are_not_stored() {
        let mut store = ProviderStore::new(PeerId::random());
        let value = Record::new(RecordKey::new(b"key"), vec![1]);
        assert!(store.put(value).is_err());
        assert_eq!(store.records().count(), 0);
    }
}

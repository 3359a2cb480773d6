//! Values made on first use that can fail to be made: modules and kernels of a device.

use once_cell::sync::OnceCell;
use std::borrow::Borrow;
use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, PoisonError, RwLock};

/// A value per key, made on first use. Other keys do not wait for one that is being made. A failure is not kept: the next use
/// tries again.
pub(crate) struct OnceMap<K, V>(RwLock<HashMap<K, Arc<OnceCell<V>>>>);

impl<K, V> Default for OnceMap<K, V> {
    fn default() -> Self {
        Self(RwLock::default())
    }
}

impl<K: Eq + Hash, V: Clone> OnceMap<K, V> {
    /// The value of `key`, made by `init` if there is none.
    pub fn get_or_try_init<Q, E>(&self, key: &Q, init: impl FnOnce() -> Result<V, E>) -> Result<V, E>
    where
        K: Borrow<Q>,
        Q: Eq + Hash + ToOwned<Owned = K> + ?Sized,
    {
        let cell = self.0.read().unwrap_or_else(PoisonError::into_inner).get(key).map(Arc::clone);
        let cell = cell.unwrap_or_else(|| {
            let mut cells = self.0.write().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(cells.entry(key.to_owned()).or_default())
        });
        cell.get_or_try_init(init).cloned()
    }

    /// The values made so far.
    pub fn values(&self) -> Vec<V> {
        let cells = self.0.read().unwrap_or_else(PoisonError::into_inner);
        cells.values().filter_map(|cell| cell.get().cloned()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_tried_again_and_a_value_is_made_once() {
        let map = OnceMap::<String, u32>::default();
        assert_eq!(map.get_or_try_init("a", || Err("not yet")), Err("not yet"));
        assert!(map.values().is_empty());
        assert_eq!(map.get_or_try_init("a", || Ok::<_, ()>(1)), Ok(1));
        assert_eq!(map.get_or_try_init("a", || Err("made already")), Ok(1));
        assert_eq!(map.get_or_try_init("b", || Ok::<_, ()>(2)), Ok(2));
        let mut values = map.values();
        values.sort_unstable();
        assert_eq!(values, [1, 2]);
    }
}

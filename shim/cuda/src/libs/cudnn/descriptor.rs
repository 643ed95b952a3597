//! The backend descriptor store: what a program has told about tensors, operations, graphs and plans.

use super::names::{
    BAD_PARAM, NOT_FINALIZED, NOT_SUPPORTED, NULL_POINTER, Status, WRONG_DESCRIPTOR, WRONG_TYPE, attribute, element,
    kind,
};
use crate::libs::handles::Table;
use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use super::graph::Work;

/// The value of an attribute.
#[derive(Clone)]
pub(super) enum Value {
    /// `bytes` holds elements of type `element`, one after the other.
    Plain { element: c_int, bytes: Vec<u8> },
    /// Other descriptors, kept alive by this one.
    Descriptors(Vec<Arc<Descriptor>>),
}

impl Value {
    fn int64(value: i64) -> Self {
        Self::Plain { element: element::INT64, bytes: value.to_ne_bytes().to_vec() }
    }

    fn int32(value: i32) -> Self {
        Self::Plain { element: element::INT32, bytes: value.to_ne_bytes().to_vec() }
    }

    fn empty(element: c_int) -> Self {
        Self::Plain { element, bytes: Vec::new() }
    }
}

#[derive(Default)]
struct State {
    is_final: bool,
    attributes: BTreeMap<c_int, Value>,
}

/// One descriptor.
pub(super) struct Descriptor {
    /// A `cudnnBackendDescriptorType_t`.
    pub(super) kind: c_int,
    state: Mutex<State>,
    /// Of an operation graph: what it computes, known once it is final.
    work: OnceLock<Arc<Work>>,
}

/// Every descriptor of the process.
pub(super) static DESCRIPTORS: Table<Descriptor> = Table::new();

impl Descriptor {
    /// An empty descriptor of a kind that cuDNN knows.
    pub(super) fn new(kind: c_int) -> Result<Self, Status> {
        if !(0..=kind::LAST).contains(&kind) {
            return Err(NOT_SUPPORTED);
        }
        Ok(Self { kind, state: Mutex::default(), work: OnceLock::new() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets an attribute from C memory.
    ///
    /// # Safety
    /// `elements` must be null or readable for `count` elements of the type `element`.
    pub(super) unsafe fn set(
        &self,
        id: c_int,
        element: c_int,
        count: i64,
        elements: *const c_void,
    ) -> Result<(), Status> {
        let count = usize::try_from(count).map_err(|_| BAD_PARAM)?;
        let size = element::size_bytes(element).ok_or(WRONG_TYPE)?;
        if elements.is_null() && count > 0 {
            return Err(NULL_POINTER);
        }
        let value = if element == element::DESCRIPTOR {
            // SAFETY: `count` pointers by the contract.
            let handles = unsafe { read_handles(elements, count) };
            let found = handles.into_iter().map(|handle| DESCRIPTORS.get(handle).ok_or(BAD_PARAM));
            Value::Descriptors(found.collect::<Result<_, _>>()?)
        } else {
            let mut bytes = vec![0; count * size];
            if count > 0 {
                // SAFETY: `count` elements of `size` bytes by the contract.
                unsafe { std::ptr::copy_nonoverlapping(elements.cast(), bytes.as_mut_ptr(), bytes.len()) };
            }
            Value::Plain { element, bytes }
        };
        self.put(id, value)
    }

    /// Sets an attribute.
    pub(super) fn put(&self, id: c_int, value: Value) -> Result<(), Status> {
        let mut state = self.state();
        if state.is_final {
            return Err(BAD_PARAM);
        }
        state.attributes.insert(id, value);
        Ok(())
    }

    /// Makes the descriptor final: its attributes do not change any more and it can be used by others.
    pub(super) fn finalize(&self) -> Result<(), Status> {
        if self.kind == kind::OPERATION_GRAPH && self.work.get().is_none() {
            let work = Work::of(&self.descriptors(attribute::GRAPH_OPERATIONS))?;
            // A second thread that finalises the same graph computes the same.
            let _ = self.work.set(Arc::new(work));
        }
        self.require()?;
        self.state().is_final = true;
        Ok(())
    }

    /// Checks that what a final descriptor of this kind stands on is there.
    fn require(&self) -> Result<(), Status> {
        let needed = match self.kind {
            kind::ENGINE => (attribute::ENGINE_GRAPH, kind::OPERATION_GRAPH),
            kind::ENGINE_CONFIG => (attribute::CONFIG_ENGINE, kind::ENGINE),
            kind::ENGINE_HEURISTIC => (attribute::HEURISTIC_GRAPH, kind::OPERATION_GRAPH),
            kind::EXECUTION_PLAN => (attribute::PLAN_CONFIG, kind::ENGINE_CONFIG),
            _ => return Ok(()),
        };
        let other = self.descriptor(needed.0).ok_or(BAD_PARAM)?;
        if other.kind != needed.1 {
            return Err(WRONG_DESCRIPTOR);
        }
        if other.is_final() { Ok(()) } else { Err(NOT_FINALIZED) }
    }

    pub(super) fn is_final(&self) -> bool {
        self.state().is_final
    }

    /// What a final operation graph computes.
    fn graph_work(&self) -> Option<Arc<Work>> {
        self.work.get().cloned()
    }

    /// The work of an execution plan: that of the graph behind its configuration and engine.
    pub(super) fn plan_work(&self) -> Option<Arc<Work>> {
        let engine = self.descriptor(attribute::PLAN_CONFIG)?.descriptor(attribute::CONFIG_ENGINE)?;
        engine.descriptor(attribute::ENGINE_GRAPH)?.graph_work()
    }

    /// A plain attribute as 64-bit integers (empty when it is not set).
    pub(super) fn integers(&self, id: c_int) -> Vec<i64> {
        match self.state().attributes.get(&id) {
            Some(Value::Plain { element, bytes }) => match element::size_bytes(*element) {
                Some(8) => bytes.chunks_exact(8).map(|c| i64::from_ne_bytes(c.try_into().expect("8 bytes"))).collect(),
                Some(4) => bytes
                    .chunks_exact(4)
                    .map(|c| i64::from(i32::from_ne_bytes(c.try_into().expect("4 bytes"))))
                    .collect(),
                _ => bytes.iter().map(|byte| i64::from(*byte)).collect(),
            },
            _ => Vec::new(),
        }
    }

    /// The first element of a plain attribute.
    pub(super) fn integer(&self, id: c_int) -> Option<i64> {
        self.integers(id).first().copied()
    }

    /// The descriptors of an attribute (none when it is not set).
    pub(super) fn descriptors(&self, id: c_int) -> Vec<Arc<Descriptor>> {
        match self.state().attributes.get(&id) {
            Some(Value::Descriptors(list)) => list.clone(),
            _ => Vec::new(),
        }
    }

    /// The first descriptor of an attribute.
    pub(super) fn descriptor(&self, id: c_int) -> Option<Arc<Descriptor>> {
        self.descriptors(id).into_iter().next()
    }

    /// Every descriptor that any attribute names, in the order of attribute numbers.
    pub(super) fn neighbours(&self) -> Vec<Arc<Descriptor>> {
        let state = self.state();
        let lists = state.attributes.values().filter_map(|value| match value {
            Value::Descriptors(list) => Some(list.clone()),
            Value::Plain { .. } => None,
        });
        lists.flatten().collect()
    }

    /// The value of an attribute: what was set, or what this library answers.
    fn value(self: &Arc<Self>, id: c_int) -> Result<Value, Status> {
        if let Some(value) = self.state().attributes.get(&id) {
            return Ok(value.clone());
        }
        match (self.kind, id) {
            (kind::OPERATION_GRAPH, attribute::GRAPH_ENGINE_COUNT) => Ok(Value::int64(1)),
            (kind::ENGINE_HEURISTIC, attribute::HEURISTIC_RESULTS) => self.only_config(),
            (kind::ENGINE, attribute::ENGINE_INDEX) => Ok(Value::int64(0)),
            (kind::ENGINE, attribute::ENGINE_NUMERICAL_NOTES) => Ok(Value::empty(element::NUMERICAL_NOTE)),
            (kind::ENGINE, attribute::ENGINE_BEHAVIOR_NOTES) => Ok(Value::empty(element::BEHAVIOR_NOTE)),
            (kind::ENGINE, attribute::ENGINE_KNOBS | attribute::ENGINE_LAYOUTS)
            | (kind::ENGINE_CONFIG, attribute::CONFIG_KNOBS | attribute::CONFIG_INTERMEDIATES) => {
                Ok(Value::Descriptors(Vec::new()))
            }
            (kind::ENGINE_CONFIG, attribute::CONFIG_WORKSPACE) | (kind::EXECUTION_PLAN, attribute::PLAN_WORKSPACE) => {
                Ok(Value::int64(0))
            }
            (kind::ENGINE_CONFIG, attribute::CONFIG_SHARED_MEMORY) => Ok(Value::int32(0)),
            _ => Err(NOT_SUPPORTED),
        }
    }

    /// The one configuration of the one engine for the heuristic's graph.
    fn only_config(&self) -> Result<Value, Status> {
        let graph = self.descriptor(attribute::HEURISTIC_GRAPH).ok_or(BAD_PARAM)?;
        let engine = Arc::new(Self::new(kind::ENGINE)?);
        engine.put(attribute::ENGINE_GRAPH, Value::Descriptors(vec![graph]))?;
        engine.put(attribute::ENGINE_INDEX, Value::int64(0))?;
        engine.finalize()?;
        let config = Arc::new(Self::new(kind::ENGINE_CONFIG)?);
        config.put(attribute::CONFIG_ENGINE, Value::Descriptors(vec![engine]))?;
        config.finalize()?;
        Ok(Value::Descriptors(vec![config]))
    }

    /// Copies an attribute to C memory. Descriptors are copied into those whose handles the program passes.
    ///
    /// # Safety
    /// `count` must be null or valid for a write, `elements` null or an array of `requested` elements of this type.
    pub(super) unsafe fn get(
        self: &Arc<Self>,
        id: c_int,
        element: c_int,
        requested: i64,
        count: *mut i64,
        elements: *mut c_void,
    ) -> Result<(), Status> {
        let requested = usize::try_from(requested).map_err(|_| BAD_PARAM)?;
        let size = element::size_bytes(element).ok_or(WRONG_TYPE)?;
        let value = self.value(id)?;
        let available = match &value {
            Value::Plain { element: stored, .. } if *stored != element => return Err(WRONG_TYPE),
            Value::Descriptors(_) if element != element::DESCRIPTOR => return Err(WRONG_TYPE),
            Value::Plain { bytes, .. } => bytes.len() / size,
            Value::Descriptors(list) => list.len(),
        };
        if !count.is_null() {
            // SAFETY: valid by the contract.
            unsafe { count.write(available as i64) };
        }
        let copied = requested.min(available);
        if elements.is_null() || copied == 0 {
            return Ok(());
        }
        match value {
            // SAFETY: room for `requested` elements by the contract, `bytes` has at least `copied` of them.
            Value::Plain { bytes, .. } => unsafe {
                std::ptr::copy_nonoverlapping(bytes.as_ptr(), elements.cast(), copied * size);
            },
            Value::Descriptors(list) => {
                // SAFETY: an array of `requested` handles by the contract.
                let targets = unsafe { read_handles(elements, copied) };
                for (target, source) in targets.into_iter().zip(list) {
                    DESCRIPTORS.get(target).ok_or(BAD_PARAM)?.copy_from(&source)?;
                }
            }
        }
        Ok(())
    }

    fn copy_from(&self, source: &Self) -> Result<(), Status> {
        if self.kind != source.kind {
            return Err(WRONG_DESCRIPTOR);
        }
        // Two locks are never held at once: a program may copy both ways from two threads.
        let (attributes, is_final) = {
            let state = source.state();
            (state.attributes.clone(), state.is_final)
        };
        *self.state() = State { is_final, attributes };
        Ok(())
    }
}

/// # Safety
/// `elements` must be readable for `count` pointers when `count` is not 0.
unsafe fn read_handles(elements: *const c_void, count: usize) -> Vec<*const c_void> {
    // SAFETY: in bounds by the contract; a C program may pass an unaligned array.
    (0..count).map(|index| unsafe { elements.cast::<*const c_void>().add(index).read_unaligned() }).collect()
}

//! Stream capture: the streams whose work becomes nodes, and what others may do meanwhile.

use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::ffi::{c_int, c_uint};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread::ThreadId;

use crate::error::{HipError, Result};
use crate::graph::{Graphs, graphs};
use crate::host::{get, put, put_if};
use crate::runtime::api;
use crate::stream::{LEGACY, StreamRef, stream};
use crate::work::Work;

/// `hipStreamCaptureMode`.
const GLOBAL: c_int = 0;
const RELAXED: c_int = 2;
/// `hipStreamCaptureStatus`.
const NONE: c_int = 0;
const ACTIVE: c_int = 1;
const INVALIDATED: c_int = 2;

#[derive(Default)]
pub(crate) struct Captures {
    by_id: HashMap<u64, Capture>,
    /// Captures by the ids of their streams.
    by_stream: HashMap<u64, u64>,
    next: u64,
}

struct Capture {
    graph: u64,
    /// The graph is the program's.
    given: bool,
    /// The stream that it began on.
    origin: u64,
    mode: c_int,
    thread: ThreadId,
    invalid: bool,
    /// For each stream the nodes that its next one depends on.
    last: HashMap<u64, Vec<u64>>,
    /// Nodes that the program took out of those.
    dropped: HashSet<u64>,
    /// Lists that were shown to the program: they stay where they are.
    shown: Vec<Box<[u64]>>,
}

/// How many captures there are: without one, nothing asks for the lock.
static ACTIVE_CAPTURES: AtomicUsize = AtomicUsize::new(0);

thread_local!(static MODE: Cell<c_int> = const { Cell::new(GLOBAL) });

fn none() -> bool {
    ACTIVE_CAPTURES.load(Relaxed) == 0
}

impl Captures {
    fn of(&mut self, on: StreamRef) -> Option<&mut Capture> {
        self.by_id.get_mut(self.by_stream.get(&on.id)?)
    }

    fn end(&mut self, id: u64) -> Option<Capture> {
        self.by_stream.retain(|_, capture| *capture != id);
        let capture = self.by_id.remove(&id);
        ACTIVE_CAPTURES.store(self.by_id.len(), Relaxed);
        capture
    }
}

/// Whether a stream is captured.
///
/// # Errors
/// `hipErrorStreamCaptureInvalidated`.
pub(crate) fn captures(on: StreamRef) -> Result<bool> {
    if none() {
        return Ok(false);
    }
    match graphs().captures.of(on) {
        None => Ok(false),
        Some(capture) if capture.invalid => Err(HipError::STREAM_CAPTURE_INVALIDATED),
        Some(_) => Ok(true),
    }
}

/// Adds work to the capture of a stream, behind the stream's last.
pub(crate) fn add(on: StreamRef, work: Work) -> Result<u64> {
    let mut graphs = graphs();
    let capture = graphs.captures.of(on).ok_or(HipError::ILLEGAL_STATE)?;
    let (graph, last) = (capture.graph, capture.last.get(&on.id).cloned().unwrap_or_default());
    let node = graphs.add(graph, &last, work)?;
    if let Some(capture) = graphs.captures.of(on) {
        capture.last.insert(on.id, vec![node]);
    }
    Ok(node)
}

/// For calls that wait, or that would order work of the null stream: an error while any stream is captured.
///
/// # Errors
/// `hipErrorStreamCaptureImplicit`; the captures are invalid from then on.
pub(crate) fn forbid_synchronous() -> Result {
    forbid_any(HipError::STREAM_CAPTURE_IMPLICIT)
}

/// As [`forbid_synchronous`] with another error.
pub(crate) fn forbid_any(error: HipError) -> Result {
    if none() {
        return Ok(());
    }
    let mut graphs = graphs();
    let mut all = graphs.captures.by_id.values_mut().peekable();
    if all.peek().is_none() {
        return Ok(());
    }
    all.for_each(|capture| capture.invalid = true);
    Err(error)
}

/// Invalidates what the thread's capture mode forbids to disturb. True if there was such a capture.
fn disturbs(captures: &mut Captures) -> bool {
    let mode = MODE.get();
    if mode == RELAXED {
        return false;
    }
    let here = std::thread::current().id();
    let mut found = false;
    for capture in captures.by_id.values_mut() {
        let own = capture.mode != RELAXED && capture.thread == here;
        if own || mode == GLOBAL && capture.mode == GLOBAL {
            capture.invalid = true;
            found = true;
        }
    }
    found
}

/// For calls that may wait for work, such as allocations.
///
/// # Errors
/// `hipErrorStreamCaptureUnsupported` if a capture's mode forbids that; it is invalid from then on.
pub(crate) fn forbid_unsafe() -> Result {
    if !none() && disturbs(&mut graphs().captures) {
        return Err(HipError::STREAM_CAPTURE_UNSUPPORTED);
    }
    Ok(())
}

/// For calls that wait for a stream, which is not the null stream.
///
/// # Errors
/// `hipErrorStreamCaptureUnsupported`, as above, and if the stream itself is captured.
pub(crate) fn forbid_waiting(on: StreamRef) -> Result {
    if none() || on.id == 0 {
        return Ok(());
    }
    let captures = &mut graphs().captures;
    if let Some(capture) = captures.of(on) {
        capture.invalid = true;
    } else if !disturbs(captures) {
        return Ok(());
    }
    Err(HipError::STREAM_CAPTURE_UNSUPPORTED)
}

/// Ends the capture of a stream that is destroyed.
pub(crate) fn forget_stream(on: StreamRef) {
    if none() {
        return;
    }
    let mut graphs = graphs();
    let captures = &mut graphs.captures;
    let Some(id) = captures.by_stream.remove(&on.id) else { return };
    if captures.by_id.get(&id).is_some_and(|capture| capture.origin == on.id) {
        captures.end(id);
    }
}

/// The place in a capture that an event marks.
#[derive(Clone)]
pub(crate) struct Mark {
    capture: u64,
    nodes: Vec<u64>,
}

/// The mark of an event that is recorded on a stream; `None` if the stream is not captured.
pub(crate) fn mark(on: StreamRef) -> Option<Mark> {
    if none() {
        return None;
    }
    let mut graphs = graphs();
    let capture = *graphs.captures.by_stream.get(&on.id)?;
    let nodes = graphs.captures.of(on)?.last.get(&on.id).cloned().unwrap_or_default();
    Some(Mark { capture, nodes })
}

/// For calls that wait for an event.
///
/// # Errors
/// `hipErrorCapturedEvent` if it was recorded in a capture that goes on, which is invalid then.
pub(crate) fn forbid_captured(mark: Option<&Mark>) -> Result {
    if let Some(mark) = mark
        && let Some(capture) = graphs().captures.by_id.get_mut(&mark.capture)
    {
        capture.invalid = true;
        return Err(HipError::CAPTURED_EVENT);
    }
    Ok(())
}

/// Lets a stream wait for a mark, which takes it into the capture. False if the capture is over.
///
/// # Errors
/// `hipErrorStreamCaptureMerge` if the stream is in another capture.
pub(crate) fn join(on: StreamRef, mark: &Mark) -> Result<bool> {
    let mut graphs = graphs();
    let captures = &mut graphs.captures;
    if !captures.by_id.contains_key(&mark.capture) {
        return Ok(false);
    }
    if on.id == 0 {
        return Err(HipError::INVALID_HANDLE);
    }
    if *captures.by_stream.entry(on.id).or_insert(mark.capture) != mark.capture {
        return Err(HipError::STREAM_CAPTURE_MERGE);
    }
    if let Some(capture) = captures.of(on) {
        let last = capture.last.entry(on.id).or_default();
        last.extend(mark.nodes.iter().filter(|n| !last.contains(n)).copied().collect::<Vec<_>>());
    }
    Ok(true)
}

/// Whether a stream, by its id, is in a capture that goes on.
pub(crate) fn is_captured(id: u64) -> bool {
    !none() && graphs().captures.by_stream.contains_key(&id)
}

/// Marks a node that the program adds to a graph to which a stream is captured.
pub(crate) fn by_hand(graphs: &mut Graphs, graph: u64, node: u64) {
    if graphs.captures.by_id.values().any(|capture| capture.graph == graph)
        && let Ok(node) = graphs.node_mut(node)
    {
        node.by_hand = true;
    }
}

fn begin(handle: u64, mode: c_int, into: Option<(u64, Vec<u64>)>) -> Result {
    let on = stream(handle)?;
    if on.id == 0 {
        return Err(HipError::STREAM_CAPTURE_UNSUPPORTED);
    }
    if !(GLOBAL..=RELAXED).contains(&mode) {
        return Err(HipError::INVALID_VALUE);
    }
    let mut graphs = graphs();
    if graphs.captures.by_stream.contains_key(&on.id) {
        return Err(HipError::ILLEGAL_STATE);
    }
    let given = into.is_some();
    let (graph, last) = match into {
        Some((graph, dependencies)) => {
            let nodes = graphs.graph(graph)?.nodes.clone();
            if dependencies.iter().any(|node| !nodes.contains(node)) {
                return Err(HipError::INVALID_VALUE);
            }
            for node in nodes {
                graphs.node_mut(node)?.by_hand = true;
            }
            (graph, dependencies)
        }
        None => (graphs.new_graph(), vec![]),
    };
    let captures = &mut graphs.captures;
    captures.next += 1;
    let id = captures.next;
    captures.by_stream.insert(on.id, id);
    captures.by_id.insert(
        id,
        Capture {
            graph,
            given,
            origin: on.id,
            mode,
            thread: std::thread::current().id(),
            invalid: false,
            last: HashMap::from([(on.id, last)]),
            dropped: HashSet::new(),
            shown: vec![],
        },
    );
    ACTIVE_CAPTURES.store(captures.by_id.len(), Relaxed);
    Ok(())
}

fn end(handle: u64) -> Result<u64> {
    if let 0 | LEGACY = handle {
        return Err(HipError::ILLEGAL_STATE);
    }
    let on = stream(handle)?;
    let mut graphs = graphs();
    let captures = &mut graphs.captures;
    let id = *captures.by_stream.get(&on.id).ok_or(HipError::ILLEGAL_STATE)?;
    let capture = captures.of(on).ok_or(HipError::ILLEGAL_STATE)?;
    if capture.origin != on.id {
        return Err(HipError::STREAM_CAPTURE_UNMATCHED);
    }
    if capture.mode != RELAXED && capture.thread != std::thread::current().id() {
        return Err(HipError::STREAM_CAPTURE_WRONG_THREAD);
    }
    let capture = captures.end(id).ok_or(HipError::ILLEGAL_STATE)?;
    let complete = if capture.invalid {
        Err(HipError::STREAM_CAPTURE_INVALIDATED)
    } else {
        joined(&graphs, &capture, on)
    };
    if complete.is_err() && !capture.given {
        let gone = graphs.destroy_graph(capture.graph);
        drop(graphs);
        gone?.finish();
    }
    complete.map(|()| capture.graph)
}

/// Work of other streams must lead to the origin's last node.
fn joined(graphs: &Graphs, capture: &Capture, on: StreamRef) -> Result {
    let last = capture.last.get(&on.id).cloned().unwrap_or_default();
    for node in &graphs.graph(capture.graph)?.nodes {
        let leaf = graphs.node(*node)?;
        let may_end = last.contains(node) || leaf.by_hand || capture.dropped.contains(node);
        if leaf.dependents.is_empty() && !may_end {
            return Err(HipError::STREAM_CAPTURE_UNJOINED);
        }
    }
    Ok(())
}

/// The status of a stream, and the id of its capture.
fn status(handle: u64) -> Result<(c_int, u64)> {
    let on = stream(handle)?;
    if none() {
        return Ok((NONE, 0));
    }
    let captures = &mut graphs().captures;
    if on.id == 0 && !captures.by_id.is_empty() {
        return Err(HipError::STREAM_CAPTURE_IMPLICIT);
    }
    let id = captures.by_stream.get(&on.id).copied().unwrap_or(0);
    Ok(match captures.of(on) {
        None => (NONE, 0),
        Some(capture) if capture.invalid => (INVALIDATED, id),
        Some(_) => (ACTIVE, id),
    })
}

/// Handles in an array of the program.
pub(crate) fn list(from: *const u64, count: u64) -> Result<Vec<u64>> {
    if count > 0 && from.is_null() {
        return Err(HipError::INVALID_VALUE);
    }
    (0..count as usize).map(|i| get(from.wrapping_add(i))).collect()
}

api! {
    fn hipStreamBeginCapture(on: u64, mode: c_int) { begin(on, mode, None) }

    fn hipStreamBeginCaptureToGraph(
        on: u64,
        graph: u64,
        dependencies: *const u64,
        edges: u64,
        count: u64,
        mode: c_int,
    ) {
        if edges != 0 {
            return Err(HipError::NOT_SUPPORTED);
        }
        if graph == 0 || dependencies.is_null() != (count == 0) {
            return Err(HipError::INVALID_VALUE);
        }
        begin(on, mode, Some((graph, list(dependencies, count)?)))
    }

    fn hipStreamEndCapture(on: u64, graph: *mut u64) {
        if graph.is_null() {
            return Err(HipError::INVALID_VALUE);
        }
        let ended = end(on);
        put(graph, ended.unwrap_or(0))?;
        ended.map(drop)
    }

    fn hipStreamIsCapturing(on: u64, result: *mut c_int) {
        if result.is_null() {
            return Err(HipError::INVALID_VALUE);
        }
        put(result, status(on)?.0)
    }

    fn hipStreamGetCaptureInfo(on: u64, result: *mut c_int, id: *mut u64) {
        if result.is_null() {
            return Err(HipError::INVALID_VALUE);
        }
        let (status, capture) = status(on)?;
        put(result, status)?;
        if status == ACTIVE { put_if(id, capture) } else { Ok(()) }
    }

    fn hipStreamGetCaptureInfo_v2(
        on: u64,
        result: *mut c_int,
        id: *mut u64,
        graph: *mut u64,
        dependencies: *mut u64,
        count: *mut u64,
    ) {
        if result.is_null() {
            return Err(HipError::INVALID_VALUE);
        }
        let (status, number) = status(on)?;
        put(result, status)?;
        if status != ACTIVE {
            return Ok(());
        }
        let on = stream(on)?;
        let mut graphs = graphs();
        let capture = graphs.captures.of(on).ok_or(HipError::ILLEGAL_STATE)?;
        put_if(id, number)?;
        put_if(graph, capture.graph)?;
        let last = capture.last.get(&on.id).cloned().unwrap_or_default().into_boxed_slice();
        put_if(count, last.len() as u64)?;
        put_if(dependencies, if last.is_empty() { 0 } else { last.as_ptr() as u64 })?;
        if !dependencies.is_null() {
            capture.shown.push(last);
        }
        Ok(())
    }

    fn hipStreamUpdateCaptureDependencies(on: u64, dependencies: *const u64, count: u64, flags: c_uint) {
        const ADD: c_uint = 0;
        const SET: c_uint = 1;
        let on = stream(on)?;
        let mut graphs = graphs();
        let capture = graphs.captures.of(on).ok_or(HipError::ILLEGAL_STATE)?;
        let graph = capture.graph;
        let known = graphs.graph(graph)?.nodes.clone();
        if !matches!(flags, ADD | SET) || count > known.len() as u64 {
            return Err(HipError::INVALID_VALUE);
        }
        let new = list(dependencies, count)?;
        if new.iter().any(|node| !known.contains(node)) {
            return Err(HipError::INVALID_VALUE);
        }
        let capture = graphs.captures.of(on).ok_or(HipError::ILLEGAL_STATE)?;
        let last = capture.last.entry(on.id).or_default();
        if flags == SET {
            capture.dropped.extend(last.drain(..));
        }
        for node in new {
            if !last.contains(&node) {
                last.push(node);
            }
        }
        Ok(())
    }

    fn hipThreadExchangeStreamCaptureMode(mode: *mut c_int) {
        let new = get(mode)?;
        if !(GLOBAL..=RELAXED).contains(&new) {
            return Err(HipError::INVALID_VALUE);
        }
        put(mode, MODE.replace(new))
    }
}

//! The functions of graphs.

use std::ffi::{c_char, c_int, c_uint};
use std::sync::Arc;

use bytemuck::Pod;

use crate::abi::{
    DriverMemcpy3D, DriverMemsetParams, GraphNodeParams, HostNodeParams, InstantiateParams, KernelNodeParams,
    LaunchAttribute, MemAllocNodeParams, Memcpy3D, MemsetParams,
};
use crate::capture::{self, by_hand, list};
use crate::error::{HipError, Result};
use crate::graph::{Destroyed, Graphs, Node, graphs, launch};
use crate::host::{get, put, string};
use crate::memory::{self, GraphMemory};
use crate::queue;
use crate::runtime::{Runtime, api, runtime, say};
use crate::stream::{event, stream};
use crate::work::{Copy, Fill, Kernel, Work};

const INVALID: HipError = HipError::INVALID_VALUE;

/// `hipGraphInstantiateFlags`, one at a time.
const AUTO_FREE: u64 = 1;
const UPLOAD: u64 = 2;
const DEVICE_LAUNCH: u64 = 4;
const NODE_PRIORITY: u64 = 8;

/// A new node, whose work is made when the other arguments are known to be right.
fn add(
    node: *mut u64,
    graph: u64,
    dependencies: *const u64,
    count: u64,
    work: impl FnOnce() -> Result<Work>,
) -> Result {
    if node.is_null() {
        return Err(INVALID);
    }
    let dependencies = list(dependencies, count)?;
    graphs().graph(graph)?;
    let work = work()?;
    let mut graphs = graphs();
    let new = graphs.add(graph, &dependencies, work)?;
    by_hand(&mut graphs, graph, new);
    put(node, new)
}

/// Parameters that a pointer argument points to; the argument is checked before others.
fn params<T: Pod>(ptr: *const T) -> Result<T> {
    if ptr.is_null() { Err(INVALID) } else { get(ptr) }
}

/// The work of a node, or of the node of an instance that was made of it.
fn work_of(graphs: &mut Graphs, exec: Option<u64>, node: u64) -> Result<&mut Node> {
    graphs.node(node)?;
    match exec {
        Some(exec) => graphs.exec_node(exec, node),
        None => graphs.node_mut(node),
    }
}

/// Gives a node new parameters; `change` says what they do to its work.
fn change(exec: Option<u64>, node: u64, change: impl FnOnce(&Work) -> Result<Work>) -> Result {
    let old = work_of(&mut graphs(), exec, node)?.work.clone();
    let new = change(&old)?;
    work_of(&mut graphs(), exec, node)?.work = new;
    // Its memory, if it has any, goes now: the lock is released.
    drop(old);
    Ok(())
}

fn change_kernel(exec: Option<u64>, node: u64, p: *const KernelNodeParams) -> Result {
    let p = params(p)?;
    change(exec, node, |old| match old {
        Work::Kernel(old) => {
            let kernel = Kernel::new(&p)?;
            Ok(Work::Kernel(Kernel { start: old.start, stop: old.stop, ..kernel }))
        }
        _ => Err(INVALID),
    })
}

fn change_copy(exec: Option<u64>, node: u64, copy: Copy) -> Result {
    change(exec, node, |old| {
        let Work::Copy(old) = old else { return Err(INVALID) };
        if exec.is_some() && old.kind() != copy.kind() {
            return Err(INVALID);
        }
        copy.check()?;
        Ok(Work::Copy(copy))
    })
}

/// A linear copy of a node: directions must be those of the memory, and not to the same place.
fn linear(dst: u64, src: u64, bytes: u64, kind: c_int) -> Result<Copy> {
    const HOST_TO_DEVICE: c_int = 1;
    const DEVICE_TO_HOST: c_int = 2;
    const DEFAULT: c_int = 4;
    if dst == 0 || src == 0 || bytes == 0 {
        return Err(INVALID);
    }
    let copy = Copy::Linear { dst, src, bytes, kind };
    copy.check()?;
    match (memory::is_known(dst), memory::is_known(src)) {
        (true, false) if !matches!(kind, HOST_TO_DEVICE | DEFAULT) => Err(INVALID),
        (false, true) if !matches!(kind, DEVICE_TO_HOST | DEFAULT) => Err(INVALID),
        _ => Ok(copy),
    }
}

fn set_linear(exec: Option<u64>, node: u64, dst: u64, src: u64, bytes: u64, kind: c_int) -> Result {
    graphs().node(node)?;
    if dst == src {
        return Err(INVALID);
    }
    change_copy(exec, node, linear(dst, src, bytes, kind)?)
}

/// A copy to or from a symbol of a node. `other` is the other side.
fn symbol_copy(copy: Copy, symbol: u64, other: u64, bytes: u64) -> Result<Copy> {
    if symbol == 0 {
        return Err(HipError::INVALID_SYMBOL);
    }
    if other == 0 || bytes == 0 || other == symbol {
        return Err(INVALID);
    }
    if crate::register::is_variable(other) {
        return Err(INVALID);
    }
    let (inward, outward) = match copy {
        Copy::ToSymbol { .. } => (true, false),
        _ => (false, true),
    };
    let known = memory::is_known(other);
    // Host to host is no copy of a symbol; a direction says where the other side is.
    let right = match copy.kind() {
        4 => true,
        1 => inward && !memory::is_device(other),
        2 => outward && !memory::is_device(other),
        3 | 1024 => known,
        _ => false,
    };
    if !right {
        return Err(if inward { INVALID } else { HipError::INVALID_MEMCPY_DIRECTION });
    }
    copy.check()?;
    Ok(copy)
}

fn fill_of(p: &MemsetParams) -> Result<Fill> {
    if p.width == 0 || p.height == 0 || !matches!(p.element_size, 1 | 2 | 4) || p.dst == 0 {
        return Err(INVALID);
    }
    let row = p.width.checked_mul(p.element_size.into()).ok_or(INVALID)?;
    if p.height > 1 && p.pitch < row {
        return Err(INVALID);
    }
    let fill = Fill { params: *p, slice: 0, depth: 1 };
    fill.check()?;
    Ok(fill)
}

fn driver_fill(p: &DriverMemsetParams) -> MemsetParams {
    MemsetParams {
        dst: p.dst,
        element_size: p.element_size,
        pad0: 0,
        height: p.height,
        pitch: p.pitch,
        value: p.value,
        pad1: 0,
        width: p.width,
    }
}

fn change_fill(exec: Option<u64>, node: u64, p: &MemsetParams) -> Result {
    change(exec, node, |old| {
        let Work::Fill(old) = old else { return Err(INVALID) };
        let old = &old.params;
        let row = |p: &MemsetParams| p.width.saturating_mul(p.element_size.into());
        // An instance keeps the shape of its fills of rows.
        if exec.is_some() && p.height > 1 && (row(old), old.height) != (row(p), p.height) {
            return Err(INVALID);
        }
        Ok(Work::Fill(fill_of(p)?))
    })
}

fn host_of(p: *const HostNodeParams) -> Result<Work> {
    let p = params(p)?;
    if p.function == 0 { Err(INVALID) } else { Ok(Work::Host(p.function, p.data)) }
}

fn change_host(exec: Option<u64>, node: u64, p: *const HostNodeParams) -> Result {
    let new = host_of(p)?;
    change(exec, node, |old| if matches!(old, Work::Host(..)) { Ok(new) } else { Err(INVALID) })
}

fn change_event(exec: Option<u64>, node: u64, handle: u64, record: bool) -> Result {
    if handle == 0 {
        return Err(INVALID);
    }
    event(handle).map_err(|_| INVALID)?;
    change(exec, node, |old| match old {
        Work::Record(_) if record => Ok(Work::Record(handle)),
        Work::Wait(_) if !record => Ok(Work::Wait(handle)),
        _ => Err(INVALID),
    })
}

fn known_event(handle: u64) -> Result<u64> {
    event(handle).map_err(|_| INVALID)?;
    Ok(handle)
}

fn change_child(exec: u64, node: u64, graph: u64) -> Result {
    let mut graphs = graphs();
    let parent = graphs.node(node)?.graph;
    graphs.graph(graph)?;
    let own = graphs.exec_node(exec, node)?.work.clone();
    let Work::Graph(child) = own else { return Err(INVALID) };
    if parent == graph || !graphs.alike(child, graph)? {
        return Err(HipError::UNKNOWN);
    }
    graphs.update_child(child, graph)
}

/// New parameters by `hipGraphNodeParams`.
fn change_any(exec: Option<u64>, node: u64, p: *const GraphNodeParams) -> Result {
    let p = params(p)?;
    graphs().node(node)?;
    let at = p.node.as_ptr();
    match p.node_type {
        0 => change_kernel(exec, node, at.cast()),
        1 => change_copy(exec, node, Copy::Box(get(at.wrapping_add(2).cast())?)),
        2 => change_fill(exec, node, &get(at.cast())?),
        3 => change_host(exec, node, at.cast()),
        4 => match exec {
            Some(exec) => change_child(exec, node, p.node[0]),
            None => change(None, node, |_| Err(HipError::NOT_SUPPORTED)),
        },
        6 => change_event(exec, node, p.node[0], false),
        7 => change_event(exec, node, p.node[0], true),
        8..=11 => Err(HipError::NOT_SUPPORTED),
        _ => Err(INVALID),
    }
}

/// The memory of an allocation node, whose address is known when it is made.
fn allocation(p: &MemAllocNodeParams) -> Result<Arc<GraphMemory>> {
    const PINNED: c_int = 1;
    const ON_DEVICE: c_int = 1;
    let pool = &p.pool;
    if p.bytes == 0 || pool.allocation_type != PINNED || pool.location_type != ON_DEVICE {
        return Err(INVALID);
    }
    let device = runtime().device(pool.location_id).map_err(|_| INVALID)?;
    let shown = MemAllocNodeParams { ptr: 0, ..*p };
    GraphMemory::new(device, shown)
}

fn add_allocation(
    node: *mut u64,
    graph: u64,
    dependencies: *const u64,
    count: u64,
    p: *mut MemAllocNodeParams,
) -> Result {
    let given = params(p)?;
    let mut addr = 0;
    let added = add(node, graph, dependencies, count, || {
        let memory = allocation(&given)?;
        addr = memory.params.ptr;
        Ok(Work::Alloc(memory))
    });
    put(p, MemAllocNodeParams { ptr: if added.is_ok() { addr } else { 0 }, ..given })?;
    added
}

/// Copies handles to the program's array, which may be shorter or longer than what there is.
fn give(found: &[u64], array: *mut u64, count: *mut u64) -> Result {
    if count.is_null() {
        return Err(INVALID);
    }
    if array.is_null() {
        return put(count, found.len() as u64);
    }
    let room = get(count)?;
    fill_array(found, array, room)?;
    put(count, room.min(found.len() as u64))
}

/// The entries behind the last are null.
fn fill_array(found: &[u64], array: *mut u64, room: u64) -> Result {
    for i in 0..usize::try_from(room).unwrap_or(usize::MAX) {
        put(array.wrapping_add(i), found.get(i).copied().unwrap_or(0))?;
    }
    Ok(())
}

fn instantiate(exec: *mut u64, graph: u64, flags: u64) -> Result {
    if exec.is_null() {
        return Err(INVALID);
    }
    put(exec, graphs().instantiate(graph, flags)?)
}

fn launch_on(exec: u64, on: u64) -> Result {
    let graph = graphs().exec(exec)?.graph;
    let on = stream(on)?;
    if capture::captures(on)? {
        return capture::add(on, Work::Graph(graph)).map(drop);
    }
    queue::now(on, || launch(exec, on))
}

/// Why an instance cannot take the work of a graph: `hipGraphExecUpdateResult`.
enum Update {
    Topology,
    NodeType,
    Parameters,
}

/// Gives an instance the parameters of a graph of the same shape.
fn update(exec: u64, graph: u64) -> Result<std::result::Result<(), (Update, u64)>> {
    let mut graphs = graphs();
    let own = graphs.exec(exec)?.graph;
    let (old, new) = (graphs.ordered(own)?, graphs.ordered(graph)?);
    if old.len() != new.len() {
        return Ok(Err((Update::Topology, 0)));
    }
    let mut works = vec![];
    for (old, new) in old.iter().zip(&new) {
        let (a, b) = (graphs.node(*old)?, graphs.node(*new)?);
        if a.work.node_type() != b.work.node_type() {
            return Ok(Err((Update::NodeType, *new)));
        }
        if let (Work::Copy(a), Work::Copy(b)) = (&a.work, &b.work)
            && a.kind() != b.kind()
        {
            return Ok(Err((Update::Parameters, *new)));
        }
        if a.dependencies.len() != b.dependencies.len() {
            return Ok(Err((Update::Topology, *new)));
        }
        works.push((*old, *new, a.work.clone(), b.work.clone()));
    }
    for (old, new, own, work) in works {
        if let (Work::Graph(child), Work::Graph(from)) = (&own, &work) {
            if !graphs.alike(*child, *from)? {
                return Ok(Err((Update::Topology, new)));
            }
            graphs.update_child(*child, *from)?;
        } else {
            graphs.node_mut(old)?.work = work;
        }
    }
    // What the nodes had is released after the lock.
    drop(graphs);
    Ok(Ok(()))
}

fn finish(gone: Result<Destroyed>) -> Result {
    gone?.finish();
    Ok(())
}

/// `hipLaunchAttributeID`.
const WINDOW: c_int = 1;
const COOPERATIVE: c_int = 2;
const PRIORITY: c_int = 8;

fn is_kernel(node: u64) -> Result {
    let graphs = graphs();
    if matches!(graphs.node(node)?.work, Work::Kernel(_)) { Ok(()) } else { Err(INVALID) }
}

fn check_attribute(id: c_int, value: &LaunchAttribute) -> Result {
    const PERSISTING: c_int = 2;
    let right = match id {
        WINDOW => {
            // The devices have no window: only one of no bytes fits.
            (0.0..=1.0).contains(&value.hit_ratio) && value.miss != PERSISTING && value.bytes == 0
        }
        COOPERATIVE => true,
        PRIORITY => (-1..=1).contains(&(value.base as i32)),
        _ => false,
    };
    if right { Ok(()) } else { Err(INVALID) }
}

/// Counts of user objects are those of an `int`.
fn count_of(references: c_uint) -> Result<u64> {
    if references == 0 || references > i32::MAX as c_uint { Err(INVALID) } else { Ok(references.into()) }
}

fn memory_counter(device: c_int) -> Result<&'static memory::GraphUse> {
    Ok(&Runtime::device(runtime(), device).map_err(|_| HipError::INVALID_DEVICE)?.graph_use)
}

api! {
    fn hipGraphCreate(graph: *mut u64, flags: c_uint) {
        if graph.is_null() || flags != 0 {
            return Err(INVALID);
        }
        put(graph, graphs().new_graph())
    }

    fn hipGraphDestroy(graph: u64) {
        if graph == 0 {
            return Err(INVALID);
        }
        let gone = graphs().destroy_graph(graph);
        finish(gone)
    }

    fn hipGraphDestroyNode(node: u64) {
        let mut graphs = graphs();
        if matches!(graphs.node(node)?.work, Work::Alloc(_) | Work::Free(_)) {
            return Err(HipError::NOT_SUPPORTED);
        }
        let gone = graphs.remove_node(node);
        drop(graphs);
        finish(gone)
    }

    fn hipGraphClone(clone: *mut u64, graph: u64) {
        if clone.is_null() {
            return Err(INVALID);
        }
        put(clone, graphs().clone_graph(graph)?)
    }

    fn hipGraphNodeFindInClone(found: *mut u64, node: u64, clone: u64) {
        let graphs = graphs();
        let id = graphs.node(node)?.id;
        let graph = graphs.graph(clone)?;
        let same = |n: &&u64| graphs.node(**n).is_ok_and(|n| n.id == id);
        let copy = graph.nodes.iter().find(same).filter(|_| graph.is_clone).ok_or(INVALID)?;
        put(found, *copy)
    }

    fn hipGraphAddKernelNode(
        node: *mut u64,
        graph: u64,
        dependencies: *const u64,
        count: u64,
        p: *const KernelNodeParams,
    ) {
        let p = params(p)?;
        add(node, graph, dependencies, count, || Ok(Work::Kernel(Kernel::new(&p)?)))
    }

    fn hipGraphAddMemcpyNode(
        node: *mut u64,
        graph: u64,
        dependencies: *const u64,
        count: u64,
        p: *const Memcpy3D,
    ) {
        let copy = Copy::Box(params(p)?);
        add(node, graph, dependencies, count, || copy.check().map(|()| Work::Copy(copy)))
    }

    fn hipDrvGraphAddMemcpyNode(
        node: *mut u64,
        graph: u64,
        dependencies: *const u64,
        count: u64,
        p: *const DriverMemcpy3D,
        context: u64,
    ) {
        let copy = Copy::Driver(params(p)?);
        if context == 0 {
            return Err(INVALID);
        }
        add(node, graph, dependencies, count, || copy.check().map(|()| Work::Copy(copy)))
    }

    fn hipGraphAddMemcpyNode1D(
        node: *mut u64,
        graph: u64,
        dependencies: *const u64,
        count: u64,
        dst: u64,
        src: u64,
        bytes: u64,
        kind: c_int,
    ) {
        add(node, graph, dependencies, count, || Ok(Work::Copy(linear(dst, src, bytes, kind)?)))
    }

    fn hipGraphAddMemcpyNodeToSymbol(
        node: *mut u64,
        graph: u64,
        dependencies: *const u64,
        count: u64,
        symbol: u64,
        src: u64,
        bytes: u64,
        offset: u64,
        kind: c_int,
    ) {
        let copy = Copy::ToSymbol { symbol, offset, src, bytes, kind };
        add(node, graph, dependencies, count, || Ok(Work::Copy(symbol_copy(copy, symbol, src, bytes)?)))
    }

    fn hipGraphAddMemcpyNodeFromSymbol(
        node: *mut u64,
        graph: u64,
        dependencies: *const u64,
        count: u64,
        dst: u64,
        symbol: u64,
        bytes: u64,
        offset: u64,
        kind: c_int,
    ) {
        let copy = Copy::FromSymbol { dst, symbol, offset, bytes, kind };
        add(node, graph, dependencies, count, || Ok(Work::Copy(symbol_copy(copy, symbol, dst, bytes)?)))
    }

    fn hipGraphAddMemsetNode(
        node: *mut u64,
        graph: u64,
        dependencies: *const u64,
        count: u64,
        p: *const MemsetParams,
    ) {
        let p = params(p)?;
        add(node, graph, dependencies, count, || Ok(Work::Fill(fill_of(&p)?)))
    }

    fn hipDrvGraphAddMemsetNode(
        node: *mut u64,
        graph: u64,
        dependencies: *const u64,
        count: u64,
        p: *const DriverMemsetParams,
        _context: u64,
    ) {
        let p = driver_fill(&params(p)?);
        add(node, graph, dependencies, count, || Ok(Work::Fill(fill_of(&p)?)))
    }

    fn hipGraphAddHostNode(
        node: *mut u64,
        graph: u64,
        dependencies: *const u64,
        count: u64,
        p: *const HostNodeParams,
    ) {
        let work = host_of(p)?;
        add(node, graph, dependencies, count, || Ok(work))
    }

    fn hipGraphAddEmptyNode(node: *mut u64, graph: u64, dependencies: *const u64, count: u64) {
        add(node, graph, dependencies, count, || Ok(Work::Empty))
    }

    fn hipGraphAddChildGraphNode(node: *mut u64, graph: u64, dependencies: *const u64, count: u64, child: u64) {
        add(node, graph, dependencies, count, || graphs().graph(child).map(|_| Work::Graph(child)))
    }

    fn hipGraphAddEventRecordNode(node: *mut u64, graph: u64, dependencies: *const u64, count: u64, event: u64) {
        add(node, graph, dependencies, count, || Ok(Work::Record(known_event(event)?)))
    }

    fn hipGraphAddEventWaitNode(node: *mut u64, graph: u64, dependencies: *const u64, count: u64, event: u64) {
        add(node, graph, dependencies, count, || Ok(Work::Wait(known_event(event)?)))
    }

    fn hipGraphAddMemAllocNode(
        node: *mut u64,
        graph: u64,
        dependencies: *const u64,
        count: u64,
        p: *mut MemAllocNodeParams,
    ) {
        add_allocation(node, graph, dependencies, count, p)
    }

    fn hipGraphAddMemFreeNode(node: *mut u64, graph: u64, dependencies: *const u64, count: u64, ptr: u64) {
        if dependencies.is_null() != (count == 0) {
            return Err(INVALID);
        }
        add(node, graph, dependencies, count, || memory::claim_free(ptr).map(|()| Work::Free(ptr)))
    }

    fn hipDrvGraphAddMemFreeNode(node: *mut u64, graph: u64, dependencies: *const u64, count: u64, ptr: u64) {
        if dependencies.is_null() != (count == 0) {
            return Err(INVALID);
        }
        add(node, graph, dependencies, count, || memory::claim_free(ptr).map(|()| Work::Free(ptr)))
    }

    fn hipGraphAddNode(
        node: *mut u64,
        graph: u64,
        dependencies: *const u64,
        count: u64,
        p: *mut GraphNodeParams,
    ) {
        let mut given = params(p)?;
        let at = given.node.as_ptr();
        let first = given.node[0];
        if given.node_type == 10 {
            let result = add_allocation(node, graph, dependencies, count, given.node.as_mut_ptr().cast());
            put(p, given)?;
            return result;
        }
        add(node, graph, dependencies, count, || match given.node_type {
            0 => Ok(Work::Kernel(Kernel::new(&get(at.cast())?)?)),
            1 => {
                let copy = Copy::Box(get(at.wrapping_add(2).cast())?);
                copy.check().map(|()| Work::Copy(copy))
            }
            2 => Ok(Work::Fill(fill_of(&get(at.cast())?)?)),
            3 => host_of(at.cast()),
            4 => graphs().graph(first).map(|_| Work::Graph(first)),
            5 => Ok(Work::Empty),
            6 => Ok(Work::Wait(known_event(first)?)),
            7 => Ok(Work::Record(known_event(first)?)),
            8 | 9 => Err(HipError::NOT_SUPPORTED),
            11 => memory::claim_free(first).map(|()| Work::Free(first)),
            _ => Err(INVALID),
        })
    }

    fn hipGraphAddDependencies(graph: u64, from: *const u64, to: *const u64, count: u64) {
        let mut graphs = graphs();
        graphs.graph(graph)?;
        let (from, to) = (list(from, count)?, list(to, count)?);
        for (from, to) in from.iter().zip(&to) {
            if from == to || graphs.node(*from)?.graph != graph || graphs.node(*to)?.graph != graph {
                return Err(INVALID);
            }
        }
        from.iter().zip(&to).try_for_each(|(from, to)| graphs.connect(*from, *to))
    }

    fn hipGraphRemoveDependencies(graph: u64, from: *const u64, to: *const u64, count: u64) {
        let mut graphs = graphs();
        graphs.graph(graph)?;
        let (from, to) = (list(from, count)?, list(to, count)?);
        for (from, to) in from.iter().zip(&to) {
            if graphs.node(*from)?.graph != graph || graphs.node(*to)?.graph != graph {
                return Err(INVALID);
            }
            graphs.disconnect(*from, *to)?;
        }
        Ok(())
    }

    fn hipGraphGetNodes(graph: u64, nodes: *mut u64, count: *mut u64) {
        give(&graphs().ordered(graph)?, nodes, count)
    }

    fn hipGraphGetRootNodes(graph: u64, nodes: *mut u64, count: *mut u64) {
        let graphs = graphs();
        let is_root = |n: &&u64| graphs.node(**n).is_ok_and(|n| n.dependencies.is_empty());
        let roots: Vec<u64> = graphs.graph(graph)?.nodes.iter().filter(is_root).copied().collect();
        give(&roots, nodes, count)
    }

    fn hipGraphGetEdges(graph: u64, from: *mut u64, to: *mut u64, count: *mut u64) {
        let graphs = graphs();
        let (mut tails, mut heads) = (vec![], vec![]);
        for node in &graphs.graph(graph)?.nodes {
            for next in &graphs.node(*node)?.dependents {
                tails.push(*node);
                heads.push(*next);
            }
        }
        if count.is_null() || from.is_null() != to.is_null() {
            return Err(INVALID);
        }
        if from.is_null() {
            return put(count, tails.len() as u64);
        }
        let room = get(count)?;
        fill_array(&tails, from, room)?;
        fill_array(&heads, to, room)?;
        put(count, room.min(tails.len() as u64))
    }

    fn hipGraphNodeGetDependencies(node: u64, nodes: *mut u64, count: *mut u64) {
        give(&graphs().node(node)?.dependencies, nodes, count)
    }

    fn hipGraphNodeGetDependentNodes(node: u64, nodes: *mut u64, count: *mut u64) {
        give(&graphs().node(node)?.dependents, nodes, count)
    }

    fn hipGraphNodeGetType(node: u64, kind: *mut c_int) {
        put(kind, graphs().node(node)?.work.node_type())
    }

    fn hipGraphInstantiate(exec: *mut u64, graph: u64, _node: *mut u64, _log: *mut c_char, _size: u64) {
        instantiate(exec, graph, 0)
    }

    fn hipGraphInstantiateWithFlags(exec: *mut u64, graph: u64, flags: u64) {
        if !matches!(flags, 0 | AUTO_FREE | NODE_PRIORITY) {
            return Err(INVALID);
        }
        instantiate(exec, graph, flags)
    }

    fn hipGraphInstantiateWithParams(exec: *mut u64, graph: u64, p: *mut InstantiateParams) {
        const ERROR: c_int = 1;
        let given = params(p)?;
        if exec.is_null() || graph == 0 {
            return Err(INVALID);
        }
        let result = if matches!(given.flags, 0 | AUTO_FREE | UPLOAD | DEVICE_LAUNCH | NODE_PRIORITY) {
            instantiate(exec, graph, given.flags)
        } else {
            Err(INVALID)
        };
        let code = if result.is_ok() { 0 } else { ERROR };
        put(p, InstantiateParams { error_node: 0, result: code, ..given })?;
        result?;
        if given.flags == UPLOAD { stream(given.upload_stream).map(drop) } else { Ok(()) }
    }

    fn hipGraphExecDestroy(exec: u64) {
        let gone = graphs().destroy_exec(exec);
        finish(gone)
    }

    fn hipGraphExecGetFlags(exec: u64, flags: *mut u64) { put(flags, graphs().exec(exec)?.flags) }
    fn hipGraphLaunch(exec: u64, on: u64) { launch_on(exec, on) }

    fn hipGraphUpload(exec: u64, on: u64) {
        stream(on)?;
        graphs().exec(exec).map(drop)
    }

    fn hipGraphExecUpdate(exec: u64, graph: u64, node: *mut u64, result: *mut c_int) {
        if node.is_null() || result.is_null() {
            return Err(INVALID);
        }
        match update(exec, graph)? {
            Ok(()) => {
                put(node, 0)?;
                put(result, 0)
            }
            Err((why, at)) => {
                put(node, at)?;
                put(result, match why {
                    Update::Topology => 2,
                    Update::NodeType => 3,
                    Update::Parameters => 5,
                })?;
                Err(HipError::GRAPH_EXEC_UPDATE_FAILURE)
            }
        }
    }

    fn hipGraphNodeSetEnabled(exec: u64, node: u64, enabled: c_uint) {
        *graphs().switchable(exec, node)? = enabled != 0;
        Ok(())
    }

    fn hipGraphNodeGetEnabled(exec: u64, node: u64, enabled: *mut c_uint) {
        put(enabled, c_uint::from(*graphs().switchable(exec, node)?))
    }

    fn hipGraphNodeSetParams(node: u64, p: *const GraphNodeParams) { change_any(None, node, p) }

    fn hipGraphExecNodeSetParams(exec: u64, node: u64, p: *const GraphNodeParams) {
        change_any(Some(exec), node, p)
    }

    fn hipGraphKernelNodeGetParams(node: u64, p: *mut KernelNodeParams) {
        let graphs = graphs();
        let Work::Kernel(kernel) = &graphs.node(node)?.work else { return Err(INVALID) };
        put(p, kernel.params())
    }

    fn hipGraphKernelNodeSetParams(node: u64, p: *const KernelNodeParams) { change_kernel(None, node, p) }

    fn hipGraphExecKernelNodeSetParams(exec: u64, node: u64, p: *const KernelNodeParams) {
        change_kernel(Some(exec), node, p)
    }

    fn hipGraphKernelNodeSetAttribute(node: u64, id: c_int, value: *const LaunchAttribute) {
        let value = params(value)?;
        is_kernel(node)?;
        check_attribute(id, &value)?;
        graphs().set_attribute(node, id, value)
    }

    fn hipGraphKernelNodeGetAttribute(node: u64, id: c_int, value: *mut LaunchAttribute) {
        is_kernel(node)?;
        if !matches!(id, WINDOW | COOPERATIVE | PRIORITY) {
            return Err(INVALID);
        }
        put(value, graphs().attribute(node, id)?)
    }

    fn hipGraphKernelNodeCopyAttributes(src: u64, dst: u64) {
        is_kernel(src)?;
        is_kernel(dst)?;
        let mut graphs = graphs();
        let (from, to) = (graphs.node(src)?.attribute, graphs.node(dst)?.attribute);
        match (from, to) {
            (None, None) => Ok(()),
            (Some((id, value)), to) if to.is_none_or(|(other, _)| other == id) => graphs.set_attribute(dst, id, value),
            _ => Err(HipError::INVALID_CONTEXT),
        }
    }

    fn hipGraphMemcpyNodeGetParams(node: u64, p: *mut Memcpy3D) {
        let graphs = graphs();
        match graphs.node(node)?.work {
            Work::Copy(Copy::Box(params)) => put(p, params),
            _ => Err(INVALID),
        }
    }

    fn hipGraphMemcpyNodeSetParams(node: u64, p: *const Memcpy3D) {
        change_copy(None, node, Copy::Box(params(p)?))
    }

    fn hipGraphExecMemcpyNodeSetParams(exec: u64, node: u64, p: *const Memcpy3D) {
        let copy = Copy::Box(params(p)?);
        graphs().exec(exec)?;
        copy.check().map_err(|_| INVALID)?;
        change_copy(Some(exec), node, copy)
    }

    fn hipDrvGraphMemcpyNodeGetParams(node: u64, p: *mut DriverMemcpy3D) {
        let graphs = graphs();
        match graphs.node(node)?.work {
            Work::Copy(Copy::Driver(params)) => put(p, params),
            _ => Err(INVALID),
        }
    }

    fn hipDrvGraphMemcpyNodeSetParams(node: u64, p: *const DriverMemcpy3D) {
        change_copy(None, node, Copy::Driver(params(p)?))
    }

    fn hipDrvGraphExecMemcpyNodeSetParams(exec: u64, node: u64, p: *const DriverMemcpy3D, _context: u64) {
        change_copy(Some(exec), node, Copy::Driver(params(p)?))
    }

    fn hipGraphMemcpyNodeSetParams1D(node: u64, dst: u64, src: u64, bytes: u64, kind: c_int) {
        set_linear(None, node, dst, src, bytes, kind)
    }

    fn hipGraphExecMemcpyNodeSetParams1D(exec: u64, node: u64, dst: u64, src: u64, bytes: u64, kind: c_int) {
        set_linear(Some(exec), node, dst, src, bytes, kind)
    }

    fn hipGraphMemcpyNodeSetParamsToSymbol(
        node: u64,
        symbol: u64,
        src: u64,
        bytes: u64,
        offset: u64,
        kind: c_int,
    ) {
        let copy = Copy::ToSymbol { symbol, offset, src, bytes, kind };
        change_copy(None, node, symbol_copy(copy, symbol, src, bytes)?)
    }

    fn hipGraphExecMemcpyNodeSetParamsToSymbol(
        exec: u64,
        node: u64,
        symbol: u64,
        src: u64,
        bytes: u64,
        offset: u64,
        kind: c_int,
    ) {
        let copy = Copy::ToSymbol { symbol, offset, src, bytes, kind };
        change_copy(Some(exec), node, symbol_copy(copy, symbol, src, bytes)?)
    }

    fn hipGraphMemcpyNodeSetParamsFromSymbol(
        node: u64,
        dst: u64,
        symbol: u64,
        bytes: u64,
        offset: u64,
        kind: c_int,
    ) {
        let copy = Copy::FromSymbol { dst, symbol, offset, bytes, kind };
        change_copy(None, node, symbol_copy(copy, symbol, dst, bytes)?)
    }

    fn hipGraphExecMemcpyNodeSetParamsFromSymbol(
        exec: u64,
        node: u64,
        dst: u64,
        symbol: u64,
        bytes: u64,
        offset: u64,
        kind: c_int,
    ) {
        let copy = Copy::FromSymbol { dst, symbol, offset, bytes, kind };
        change_copy(Some(exec), node, symbol_copy(copy, symbol, dst, bytes)?)
    }

    fn hipGraphMemsetNodeGetParams(node: u64, p: *mut MemsetParams) {
        let graphs = graphs();
        let Work::Fill(fill) = &graphs.node(node)?.work else { return Err(INVALID) };
        put(p, fill.params)
    }

    fn hipGraphMemsetNodeSetParams(node: u64, p: *const MemsetParams) { change_fill(None, node, &params(p)?) }

    fn hipGraphExecMemsetNodeSetParams(exec: u64, node: u64, p: *const MemsetParams) {
        change_fill(Some(exec), node, &params(p)?)
    }

    fn hipDrvGraphExecMemsetNodeSetParams(exec: u64, node: u64, p: *const DriverMemsetParams, _context: u64) {
        change_fill(Some(exec), node, &driver_fill(&params(p)?))
    }

    fn hipGraphHostNodeGetParams(node: u64, p: *mut HostNodeParams) {
        let graphs = graphs();
        let Work::Host(function, data) = graphs.node(node)?.work else { return Err(INVALID) };
        put(p, HostNodeParams { function, data })
    }

    fn hipGraphHostNodeSetParams(node: u64, p: *const HostNodeParams) { change_host(None, node, p) }

    fn hipGraphExecHostNodeSetParams(exec: u64, node: u64, p: *const HostNodeParams) {
        change_host(Some(exec), node, p)
    }

    fn hipGraphChildGraphNodeGetGraph(node: u64, graph: *mut u64) {
        let graphs = graphs();
        let Work::Graph(child) = graphs.node(node)?.work else { return Err(INVALID) };
        put(graph, child)
    }

    fn hipGraphExecChildGraphNodeSetParams(exec: u64, node: u64, graph: u64) { change_child(exec, node, graph) }

    fn hipGraphEventRecordNodeGetEvent(node: u64, event: *mut u64) {
        let graphs = graphs();
        let Work::Record(handle) = graphs.node(node)?.work else { return Err(INVALID) };
        put(event, handle)
    }

    fn hipGraphEventWaitNodeGetEvent(node: u64, event: *mut u64) {
        let graphs = graphs();
        let Work::Wait(handle) = graphs.node(node)?.work else { return Err(INVALID) };
        put(event, handle)
    }

    fn hipGraphEventRecordNodeSetEvent(node: u64, event: u64) { change_event(None, node, event, true) }
    fn hipGraphEventWaitNodeSetEvent(node: u64, event: u64) { change_event(None, node, event, false) }

    fn hipGraphExecEventRecordNodeSetEvent(exec: u64, node: u64, event: u64) {
        change_event(Some(exec), node, event, true)
    }

    fn hipGraphExecEventWaitNodeSetEvent(exec: u64, node: u64, event: u64) {
        change_event(Some(exec), node, event, false)
    }

    fn hipGraphMemAllocNodeGetParams(node: u64, p: *mut MemAllocNodeParams) {
        let graphs = graphs();
        let Work::Alloc(memory) = &graphs.node(node)?.work else { return Err(INVALID) };
        put(p, memory.params)
    }

    fn hipGraphMemFreeNodeGetParams(node: u64, ptr: *mut u64) {
        let graphs = graphs();
        let Work::Free(freed) = graphs.node(node)?.work else { return Err(INVALID) };
        put(ptr, freed)
    }

    fn hipDeviceGetGraphMemAttribute(device: c_int, attribute: c_int, value: *mut u64) {
        let counter = memory_counter(device)?;
        put(value, counter.get(attribute).ok_or(INVALID)?)
    }

    fn hipDeviceSetGraphMemAttribute(device: c_int, attribute: c_int, value: *const u64) {
        let counter = memory_counter(device)?;
        // High-water marks can be set to zero.
        if params(value)? != 0 || !matches!(attribute, 1 | 3) {
            return Err(INVALID);
        }
        counter.reset(attribute);
        Ok(())
    }

    fn hipDeviceGraphMemTrim(device: c_int) {
        memory_counter(device)?.trim();
        Ok(())
    }

    fn hipUserObjectCreate(object: *mut u64, data: u64, destroy: u64, references: c_uint, flags: c_uint) {
        const NO_DESTRUCTOR_SYNC: c_uint = 1;
        if object.is_null() || flags != NO_DESTRUCTOR_SYNC || destroy == 0 {
            return Err(INVALID);
        }
        put(object, graphs().new_object(data, destroy, count_of(references)?))
    }

    fn hipUserObjectRetain(object: u64, references: c_uint) {
        if object == 0 {
            return Err(INVALID);
        }
        graphs().retain(object, count_of(references)?)
    }

    fn hipUserObjectRelease(object: u64, references: c_uint) {
        if object == 0 {
            return Err(INVALID);
        }
        let mut gone = Destroyed::default();
        graphs().release(object, count_of(references)?, &mut gone);
        gone.finish();
        Ok(())
    }

    fn hipGraphRetainUserObject(graph: u64, object: u64, references: c_uint, flags: c_uint) {
        const MOVE: c_uint = 1;
        if object == 0 || !matches!(flags, 0 | MOVE) {
            return Err(INVALID);
        }
        graphs().graph_retain(graph, object, count_of(references)?, flags == MOVE)
    }

    fn hipGraphReleaseUserObject(graph: u64, object: u64, references: c_uint) {
        if object == 0 {
            return Err(INVALID);
        }
        let gone = graphs().graph_release(graph, object, count_of(references)?);
        finish(gone)
    }

    fn hipGraphDebugDotPrint(graph: u64, path: *const c_char, _flags: c_uint) {
        let text = graphs().dot(graph)?;
        let path = string(path)?;
        std::fs::write(&path, text).map_err(|error| {
            say!("{path}: {error}");
            HipError::OPERATING_SYSTEM
        })
    }
}

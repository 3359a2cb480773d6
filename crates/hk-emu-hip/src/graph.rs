//! Graphs: nodes with work and their dependencies, instances of them, and the objects that they keep alive.
//!
//! One lock guards all of them. What calls functions of the program, or runs work, happens outside of it.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{LazyLock, Mutex, MutexGuard};

use bytemuck::Zeroable;

use crate::abi::LaunchAttribute;
use crate::capture::Captures;
use crate::error::{HipError, Result};
use crate::runtime::{Tag, lock};
use crate::stream::{self, StreamRef};
use crate::work::Work;

#[derive(Default)]
pub(crate) struct Graphs {
    graphs: HashMap<u64, Graph>,
    nodes: HashMap<u64, Node>,
    execs: HashMap<u64, Exec>,
    objects: HashMap<u64, UserObject>,
    pub captures: Captures,
    next: u64,
}

#[derive(Default)]
pub(crate) struct Graph {
    /// Handles, in the order in which they were added.
    pub nodes: Vec<u64>,
    /// Made by `hipGraphClone`.
    pub is_clone: bool,
    /// The part of an instance, or of a node: programs cannot destroy it.
    owned: bool,
    instantiated: bool,
    /// User objects and how many references the graph has.
    objects: HashMap<u64, u64>,
}

#[derive(Clone)]
pub(crate) struct Node {
    pub graph: u64,
    pub work: Work,
    pub dependencies: Vec<u64>,
    pub dependents: Vec<u64>,
    /// The same for a node and its copies.
    pub id: u64,
    /// The attribute of a kernel that was set, and its value.
    pub attribute: Option<(i32, LaunchAttribute)>,
    /// Added by the program while a stream was captured to the graph.
    pub by_hand: bool,
    enabled: bool,
}

pub(crate) struct Exec {
    pub graph: u64,
    /// The instance's own nodes by those of the graph that it was made of.
    pub nodes: HashMap<u64, u64>,
    pub flags: u64,
}

struct UserObject {
    data: u64,
    destroy: u64,
    references: u64,
}

/// Functions that destroy user objects, to be called when the lock is released.
#[derive(Default)]
#[must_use]
pub(crate) struct Destroyed(Vec<(u64, u64)>, Vec<Work>);

impl Destroyed {
    pub fn finish(self) {
        for (function, data) in self.0 {
            stream::call_host(function, data);
        }
    }
}

/// All of them.
pub(crate) fn graphs() -> MutexGuard<'static, Graphs> {
    static GRAPHS: LazyLock<Mutex<Graphs>> = LazyLock::new(Mutex::default);
    lock(&GRAPHS)
}

const INVALID: HipError = HipError::INVALID_VALUE;

impl Graphs {
    fn handle(&mut self, tag: Tag) -> u64 {
        self.next += 1;
        tag.handle(self.next)
    }

    pub fn new_graph(&mut self) -> u64 {
        let handle = self.handle(Tag::Graph);
        self.graphs.insert(handle, Graph::default());
        handle
    }

    pub fn graph(&self, handle: u64) -> Result<&Graph> {
        self.graphs.get(&handle).ok_or(INVALID)
    }

    pub fn node(&self, handle: u64) -> Result<&Node> {
        self.nodes.get(&handle).ok_or(INVALID)
    }

    pub fn node_mut(&mut self, handle: u64) -> Result<&mut Node> {
        self.nodes.get_mut(&handle).ok_or(INVALID)
    }

    pub fn exec(&self, handle: u64) -> Result<&Exec> {
        self.execs.get(&handle).ok_or(INVALID)
    }

    /// The instance's own node.
    pub fn exec_node(&mut self, exec: u64, node: u64) -> Result<&mut Node> {
        let own = *self.exec(exec)?.nodes.get(&node).ok_or(INVALID)?;
        self.node_mut(own)
    }

    /// Adds a node behind others of its graph.
    ///
    /// # Errors
    /// `hipErrorInvalidValue` for dependencies that are of other graphs or there twice.
    pub fn add(&mut self, graph: u64, dependencies: &[u64], work: Work) -> Result<u64> {
        self.graph(graph)?;
        let mut seen = HashSet::new();
        for node in dependencies {
            if self.node(*node)?.graph != graph || !seen.insert(node) {
                return Err(INVALID);
            }
        }
        let work = match work {
            Work::Graph(child) => Work::Graph(self.copy_graph(child, &mut HashMap::new(), true)?),
            other => other,
        };
        let handle = self.handle(Tag::Node);
        let node = Node {
            graph,
            work,
            dependencies: dependencies.to_vec(),
            dependents: vec![],
            id: self.next,
            attribute: None,
            by_hand: false,
            enabled: true,
        };
        self.nodes.insert(handle, node);
        for dependency in dependencies {
            self.node_mut(*dependency)?.dependents.push(handle);
        }
        self.graphs.get_mut(&graph).ok_or(INVALID)?.nodes.push(handle);
        Ok(handle)
    }

    pub fn connect(&mut self, from: u64, to: u64) -> Result {
        if self.node(from)?.dependents.contains(&to) {
            return Err(INVALID);
        }
        self.node_mut(from)?.dependents.push(to);
        self.node_mut(to)?.dependencies.push(from);
        Ok(())
    }

    pub fn disconnect(&mut self, from: u64, to: u64) -> Result {
        if !self.node(from)?.dependents.contains(&to) {
            return Err(INVALID);
        }
        self.node_mut(from)?.dependents.retain(|n| *n != to);
        self.node_mut(to)?.dependencies.retain(|n| *n != from);
        Ok(())
    }

    pub fn remove_node(&mut self, handle: u64) -> Result<Destroyed> {
        let mut gone = Destroyed::default();
        let node = self.nodes.remove(&handle).ok_or(INVALID)?;
        for other in node.dependencies.iter().chain(&node.dependents) {
            if let Some(other) = self.nodes.get_mut(other) {
                other.dependents.retain(|n| *n != handle);
                other.dependencies.retain(|n| *n != handle);
            }
        }
        if let Some(graph) = self.graphs.get_mut(&node.graph) {
            graph.nodes.retain(|n| *n != handle);
        }
        self.forget(node.work, &mut gone);
        Ok(gone)
    }

    fn forget(&mut self, work: Work, gone: &mut Destroyed) {
        if let Work::Graph(child) = work {
            self.remove_graph(child, gone);
        }
        // Work may hold memory, which is released without this lock.
        gone.1.push(work);
    }

    fn remove_graph(&mut self, handle: u64, gone: &mut Destroyed) {
        let Some(graph) = self.graphs.remove(&handle) else { return };
        for node in graph.nodes {
            if let Some(node) = self.nodes.remove(&node) {
                self.forget(node.work, gone);
            }
        }
        for (object, references) in graph.objects {
            self.release(object, references, gone);
        }
    }

    /// # Errors
    /// `hipErrorIllegalState` if there is no such graph.
    pub fn destroy_graph(&mut self, handle: u64) -> Result<Destroyed> {
        if self.graphs.get(&handle).is_none_or(|graph| graph.owned) {
            return Err(HipError::ILLEGAL_STATE);
        }
        let mut gone = Destroyed::default();
        self.remove_graph(handle, &mut gone);
        Ok(gone)
    }

    /// A deep copy; `map` gets the new nodes by the old ones.
    fn copy_graph(&mut self, handle: u64, map: &mut HashMap<u64, u64>, owned: bool) -> Result<u64> {
        let graph = self.graph(handle)?;
        let (nodes, objects) = (graph.nodes.clone(), graph.objects.clone());
        let new = self.new_graph();
        let mut own = vec![];
        for node in &nodes {
            let copy = self.handle(Tag::Node);
            map.insert(*node, copy);
            own.push(copy);
        }
        for node in &nodes {
            let mut copy = self.node(*node)?.clone();
            copy.graph = new;
            for list in [&mut copy.dependencies, &mut copy.dependents] {
                list.iter_mut().for_each(|n| *n = map[n]);
            }
            if let Work::Graph(child) = copy.work {
                copy.work = Work::Graph(self.copy_graph(child, map, true)?);
            }
            self.nodes.insert(map[node], copy);
        }
        for (object, references) in &objects {
            self.retain(*object, *references)?;
        }
        let graph = self.graphs.get_mut(&new).ok_or(INVALID)?;
        (graph.nodes, graph.owned, graph.objects) = (own, owned, objects);
        Ok(new)
    }

    /// Whether a graph allocates or frees memory.
    fn has_memory(&self, graph: u64) -> bool {
        let works =
            self.graphs.get(&graph).into_iter().flat_map(|g| &g.nodes).filter_map(|n| self.nodes.get(n));
        works.into_iter().any(|n| matches!(n.work, Work::Alloc(_) | Work::Free(_)))
    }

    pub fn clone_graph(&mut self, handle: u64) -> Result<u64> {
        self.graph(handle)?;
        if self.has_memory(handle) {
            return Err(HipError::NOT_SUPPORTED);
        }
        let new = self.copy_graph(handle, &mut HashMap::new(), false)?;
        self.graphs.get_mut(&new).ok_or(INVALID)?.is_clone = true;
        Ok(new)
    }

    /// # Errors
    /// `hipErrorInvalidValue` for a graph with a cycle; `hipErrorNotSupported` for a second instance of one with memory.
    pub fn instantiate(&mut self, handle: u64, flags: u64) -> Result<u64> {
        if self.graph(handle)?.instantiated && self.has_memory(handle) {
            return Err(HipError::NOT_SUPPORTED);
        }
        self.ordered(handle)?;
        let mut nodes = HashMap::new();
        let graph = self.copy_graph(handle, &mut nodes, true)?;
        self.graphs.get_mut(&handle).ok_or(INVALID)?.instantiated = true;
        let exec = self.handle(Tag::Exec);
        self.execs.insert(exec, Exec { graph, nodes, flags });
        Ok(exec)
    }

    pub fn destroy_exec(&mut self, handle: u64) -> Result<Destroyed> {
        let exec = self.execs.remove(&handle).ok_or(INVALID)?;
        let mut gone = Destroyed::default();
        self.remove_graph(exec.graph, &mut gone);
        Ok(gone)
    }

    /// The nodes of a graph, each behind those that it depends on.
    ///
    /// # Errors
    /// `hipErrorInvalidValue` if there is no such order.
    pub fn ordered(&self, graph: u64) -> Result<Vec<u64>> {
        let nodes = &self.graph(graph)?.nodes;
        let mut left: HashMap<u64, usize> = HashMap::new();
        let mut ready = VecDeque::new();
        for node in nodes {
            let n = self.node(*node)?.dependencies.len();
            left.insert(*node, n);
            if n == 0 {
                ready.push_back(*node);
            }
        }
        let mut order = vec![];
        while let Some(node) = ready.pop_front() {
            order.push(node);
            for next in &self.node(node)?.dependents {
                let n = left.get_mut(next).ok_or(INVALID)?;
                *n -= 1;
                if *n == 0 {
                    ready.push_back(*next);
                }
            }
        }
        if order.len() == nodes.len() { Ok(order) } else { Err(INVALID) }
    }

    /// The work of a graph in order, child graphs in their places.
    fn works(&self, graph: u64, all: &mut Vec<Work>) -> Result {
        for node in self.ordered(graph)? {
            let node = self.node(node)?;
            match node.work {
                Work::Graph(child) => self.works(child, all)?,
                _ if node.enabled => all.push(node.work.clone()),
                _ => {}
            }
        }
        Ok(())
    }

    /// Only kernels, copies and fills can be switched off.
    pub fn switchable(&mut self, exec: u64, node: u64) -> Result<&mut bool> {
        self.node(node)?;
        let node = self.exec_node(exec, node)?;
        match node.work {
            Work::Kernel(_) | Work::Copy(_) | Work::Fill(_) => Ok(&mut node.enabled),
            _ => Err(INVALID),
        }
    }

    /// Gives the child of a node of an instance the work of another graph of the same shape.
    pub fn update_child(&mut self, child: u64, from: u64) -> Result {
        let (old, new) = (self.ordered(child)?, self.ordered(from)?);
        for (old, new) in old.into_iter().zip(new) {
            let work = self.node(new)?.work.clone();
            if let (Work::Graph(child), Work::Graph(from)) = (&self.node(old)?.work, &work) {
                let (child, from) = (*child, *from);
                self.update_child(child, from)?;
            } else {
                self.node_mut(old)?.work = work;
            }
        }
        Ok(())
    }

    /// Whether two graphs have the same kinds of nodes in the same order.
    pub fn alike(&self, a: u64, b: u64) -> Result<bool> {
        let kinds = |graph| {
            let nodes = self.ordered(graph)?;
            nodes.iter().map(|n| Ok(self.node(*n)?.work.node_type())).collect::<Result<Vec<_>>>()
        };
        Ok(kinds(a)? == kinds(b)?)
    }

    pub fn new_object(&mut self, data: u64, destroy: u64, references: u64) -> u64 {
        let handle = self.handle(Tag::UserObject);
        self.objects.insert(handle, UserObject { data, destroy, references });
        handle
    }

    pub fn retain(&mut self, object: u64, references: u64) -> Result {
        // One that is gone is no error, as in ROCm.
        if let Some(object) = self.objects.get_mut(&object) {
            object.references += references;
        }
        Ok(())
    }

    pub fn release(&mut self, handle: u64, references: u64, gone: &mut Destroyed) {
        let Some(object) = self.objects.get_mut(&handle) else { return };
        if object.references < references {
            return;
        }
        object.references -= references;
        if object.references == 0
            && let Some(object) = self.objects.remove(&handle)
        {
            gone.0.push((object.destroy, object.data));
        }
    }

    /// References of a graph to a user object; `take` moves those that the program has.
    pub fn graph_retain(&mut self, graph: u64, object: u64, references: u64, take: bool) -> Result {
        self.graph(graph)?;
        if !self.objects.contains_key(&object) {
            return Ok(());
        }
        if !take {
            self.retain(object, references)?;
        }
        *self.graphs.get_mut(&graph).ok_or(INVALID)?.objects.entry(object).or_default() += references;
        Ok(())
    }

    pub fn graph_release(&mut self, graph: u64, object: u64, references: u64) -> Result<Destroyed> {
        let mut gone = Destroyed::default();
        let objects = &mut self.graphs.get_mut(&graph).ok_or(INVALID)?.objects;
        if let Some(has) = objects.get_mut(&object)
            && *has >= references
        {
            *has -= references;
            if *has == 0 {
                objects.remove(&object);
            }
            self.release(object, references, &mut gone);
        }
        Ok(gone)
    }

    pub fn set_attribute(&mut self, node: u64, id: i32, value: LaunchAttribute) -> Result {
        self.node_mut(node)?.attribute = Some((id, value));
        Ok(())
    }

    /// The value of an attribute; one that was not set is zero while no other is.
    pub fn attribute(&self, node: u64, id: i32) -> Result<LaunchAttribute> {
        match self.node(node)?.attribute {
            Some((set, value)) if set == id => Ok(value),
            Some(_) => Err(INVALID),
            None => Ok(LaunchAttribute::zeroed()),
        }
    }

    /// Graphviz text of a graph.
    pub fn dot(&self, graph: u64) -> Result<String> {
        const KINDS: [&str; 12] = [
            "KERNEL",
            "MEMCPY",
            "MEMSET",
            "HOST",
            "GRAPH",
            "EMPTY",
            "EVENT_WAIT",
            "EVENT_RECORD",
            "",
            "",
            "MEM_ALLOC",
            "MEM_FREE",
        ];
        let mut text = String::from("digraph dot {\n");
        let mut graphs = vec![graph];
        while let Some(graph) = graphs.pop() {
            text += &format!("subgraph \"cluster_{graph:x}\" {{\n");
            for handle in &self.graph(graph)?.nodes {
                let node = self.node(*handle)?;
                let kind = KINDS[node.work.node_type() as usize];
                text += &format!("\"{handle:x}\" [label=\"{kind}\"];\n");
                for next in &node.dependents {
                    text += &format!("\"{handle:x}\" -> \"{next:x}\";\n");
                }
                if let Work::Graph(child) = node.work {
                    graphs.push(child);
                }
            }
            text += "}\n";
        }
        Ok(text + "}\n")
    }
}

/// Runs an instance on a stream that captures nothing.
pub(crate) fn launch(exec: u64, on: StreamRef) -> Result {
    let mut works = vec![];
    {
        let graphs = graphs();
        graphs.works(graphs.exec(exec)?.graph, &mut works)?;
    }
    works.iter().try_for_each(|work| work.run(on))
}

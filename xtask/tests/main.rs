//! The tests of the commands, and those of the workspace's text: documents, comments, tools.
#![cfg(unix)]

mod commands;
mod documents;
mod files;
mod references;
mod tools;
mod vocabulary;

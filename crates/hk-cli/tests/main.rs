//! Tests of the `hk` program and of what it knows of every operator.

mod check;
mod demo;
mod exec;
mod fuzz;
mod law;
mod program;
mod run;
mod show;
mod tables;
mod time;

//! A secret that goes through every RPC and every failure, and stays nowhere.

mod controller;
mod node;

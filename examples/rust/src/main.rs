//! A session in Rust, with the stubs that build.rs makes of protos/ and nothing else of kvplane.

use std::{env, error::Error, time::Duration};

use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Channel, Endpoint};

use pb::execute_request::Message as Request;
use pb::execute_response::Message as Answer;
use pb::execution_service_client::ExecutionServiceClient;
use pb::operation::Operation;
use pb::pool_service_client::PoolServiceClient;
use pb::session_service_client::SessionServiceClient;

mod pb {
    tonic::include_proto!("kvplane.v1");
}

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// The next answer on a stream, which must be of this kind.
macro_rules! next {
    ($answers:ident, $kind:ident) => {
        match $answers.message().await?.and_then(|answer| answer.message) {
            Some(Answer::$kind(answer)) => answer,
            other => return Err(format!("the data plane has answered {other:?}").into()),
        }
    };
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let address = env::args().nth(1).ok_or("usage: session HOST:PORT")?;
    let plane = dial(&address).await?;
    let mut control = SessionServiceClient::new(plane.clone());
    let pool_id = String::from("default");
    let pool_request = pb::GetPoolRequest { pool_id: pool_id.clone() };
    let pool = PoolServiceClient::new(plane).get_pool(pool_request).await?.into_inner();
    let pb::Layout { fingerprint, dtype, groups, .. } = pool.layout.ok_or("the pool has no layout")?;
    let layout = Some(pb::Layout { fingerprint, ..Default::default() });
    let request = pb::OpenSessionRequest { pool_id, layout, ..Default::default() };
    let opened = control.open_session(request).await?.into_inner();
    let step = |number, operation, receipts| pb::StepRequest {
        session: opened.session.clone(),
        number,
        operations: vec![pb::Operation { operation: Some(operation) }],
        receipts,
        ..Default::default()
    };
    let admit = pb::Admit { sequence_id: 1, token_ids: vec![97, 98, 99], ..Default::default() };
    let planned = control.step(step(1, Operation::Admit(admit), vec![])).await?.into_inner();

    let mut data = ExecutionServiceClient::new(dial(&opened.shards[0].address).await?);
    let (requests, received) = mpsc::channel(1);
    let ask = |message| requests.send(pb::ExecuteRequest { message: Some(message) });
    // Sent first: the call returns with the headers, which may come with the first answer.
    let grant = opened.grant.clone();
    ask(Request::Open(pb::OpenExecution { grant, ..Default::default() })).await?;
    let mut answers = data.execute(ReceiverStream::new(received)).await?.into_inner();
    let layers = next!(answers, Opened).layers;
    ask(Request::Plan(pb::StartPlanRequest { plan: planned.plan, ..Default::default() })).await?;
    let started = next!(answers, Started);
    let shape = [started.num_tokens, groups[0].num_kv_heads, groups[0].head_size].map(i64::from);
    let item_bytes = if dtype == pb::ElementType::Float32 as i32 { 4 } else { 2 };
    let zeros = vec![0; item_bytes * shape.iter().product::<i64>() as usize];
    let storage = Some(pb::tensor::Storage::Data(zeros));
    let qkv = Some(pb::Tensor { dtype, shape: shape.into(), storage });
    let mut receipt = None; // comes with the last layer
    for layer in layers {
        ask(Request::Layer(pb::RunLayerRequest {
            layer,
            plan_number: started.plan_number,
            query: qkv.clone(),
            key: qkv.clone(),
            value: qkv.clone(),
            ..Default::default()
        }))
        .await?;
        let answer = next!(answers, Output);
        println!("layer {layer}: attention {:?}", answer.output.ok_or("no output")?.shape);
        receipt = answer.receipt;
    }

    let free = pb::Free { sequence_ids: vec![1] };
    control.step(step(2, Operation::Free(free), receipt.into_iter().collect())).await?;
    control.close_session(pb::CloseSessionRequest { session: opened.session.clone() }).await?;
    Ok(())
}

async fn dial(address: &str) -> Result<Channel> {
    let endpoint = Endpoint::new(format!("http://{address}"))?;
    Ok(endpoint.timeout(Duration::from_secs(10)).connect().await?)
}

// A session in Go, with the stubs that protoc makes of protos/ and nothing else of kvplane.
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"time"

	pb "kvplane/v1"

	"google.golang.org/grpc"
)

func main() {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()

	plane := dial(os.Args[1])
	control := pb.NewSessionServiceClient(plane)
	pool, err := pb.NewPoolServiceClient(plane).GetPool(ctx, &pb.GetPoolRequest{PoolId: "default"})
	check(err)
	opened, err := control.OpenSession(ctx, &pb.OpenSessionRequest{
		PoolId: "default", Layout: &pb.Layout{Fingerprint: pool.Layout.Fingerprint}})
	check(err)
	admit := &pb.Operation_Admit{Admit: &pb.Admit{SequenceId: 1, TokenIds: []int32{97, 98, 99}}}
	step := &pb.StepRequest{Session: opened.Session, Number: 1, Operations: []*pb.Operation{{Operation: admit}}}
	planned, err := control.Step(ctx, step)
	check(err)

	data := pb.NewExecutionServiceClient(dial(opened.Shards[0].Address))
	stream, err := data.Execute(ctx)
	check(err)
	ask := func(request *pb.ExecuteRequest) *pb.ExecuteResponse {
		check(stream.Send(request))
		return receive(stream)
	}
	open := &pb.OpenExecution{Grant: opened.Grant}
	layers := ask(&pb.ExecuteRequest{Message: &pb.ExecuteRequest_Open{Open: open}}).GetOpened().Layers
	plan := &pb.ExecuteRequest_Plan{Plan: &pb.StartPlanRequest{Plan: planned.Plan}}
	started := ask(&pb.ExecuteRequest{Message: plan}).GetStarted()
	qkv := zeros(started.NumTokens, pool.Layout.Groups[0])
	var receipt *pb.SignedPayload // comes with the last layer
	for _, layer := range layers {
		input := &pb.RunLayerRequest{Layer: layer, PlanNumber: started.PlanNumber, Query: qkv, Key: qkv, Value: qkv}
		output := ask(&pb.ExecuteRequest{Message: &pb.ExecuteRequest_Layer{Layer: input}}).GetOutput()
		fmt.Printf("layer %d: attention %v\n", layer, output.Output.Shape)
		receipt = output.Receipt
	}

	free := &pb.Operation_Free{Free: &pb.Free{SequenceIds: []int64{1}}}
	step = &pb.StepRequest{Session: opened.Session, Number: 2, Operations: []*pb.Operation{{Operation: free}},
		Receipts: []*pb.SignedPayload{receipt}}
	_, err = control.Step(ctx, step)
	check(err)
	_, err = control.CloseSession(ctx, &pb.CloseSessionRequest{Session: opened.Session})
	check(err)
}

func dial(address string) *grpc.ClientConn {
	connection, err := grpc.Dial(address, grpc.WithInsecure())
	check(err)
	return connection
}

// receive returns the next answer.
func receive(stream pb.ExecutionService_ExecuteClient) *pb.ExecuteResponse {
	answer, err := stream.Recv()
	check(err)
	if failure := answer.GetError(); failure != nil {
		log.Fatalf("%s: %s: %s", failure.Reason, failure.Field, failure.Message)
	}
	return answer
}

func zeros(numTokens int32, group *pb.LayerGroup) *pb.Tensor {
	shape := []int64{int64(numTokens), int64(group.NumKvHeads), int64(group.HeadSize)}
	return &pb.Tensor{Dtype: pb.ElementType_ELEMENT_TYPE_FLOAT32, Shape: shape,
		Storage: &pb.Tensor_Data{Data: make([]byte, 4*shape[0]*shape[1]*shape[2])}}
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

CREATE OR REPLACE PROCEDURE tpcc_delivery(w INTEGER, carrier INTEGER)
RETURNS TABLE (delivered INTEGER)
LANGUAGE lua AS $$
    local delivered = 0
    for d = 1, 10 do
        local oldest = db.query("SELECT no_o_id FROM new_order WHERE no_w_id = $1 AND no_d_id = $2 \
            ORDER BY no_o_id LIMIT 1", w, d)[1]
        if oldest ~= nil then
            local number = oldest.no_o_id
            db.exec("DELETE FROM new_order WHERE no_w_id = $1 AND no_d_id = $2 AND no_o_id = $3", w, d, number)
            local order = db.query("SELECT o_c_id FROM orders \
                WHERE o_w_id = $1 AND o_d_id = $2 AND o_id = $3", w, d, number)[1]
            db.exec("UPDATE orders SET o_carrier_id = $4 \
                WHERE o_w_id = $1 AND o_d_id = $2 AND o_id = $3", w, d, number, carrier)
            db.exec("UPDATE order_line SET ol_delivery_d = CURRENT_TIMESTAMP \
                WHERE ol_w_id = $1 AND ol_d_id = $2 AND ol_o_id = $3", w, d, number)
            local sum = db.query("SELECT sum(ol_amount) AS cents FROM order_line \
                WHERE ol_w_id = $1 AND ol_d_id = $2 AND ol_o_id = $3", w, d, number)[1]
            db.exec("UPDATE customer SET c_balance = c_balance + $4, c_delivery_cnt = c_delivery_cnt + 1 \
                WHERE c_w_id = $1 AND c_d_id = $2 AND c_id = $3", w, d, order.o_c_id, sum.cents)
            delivered += 1
        end
    end
    return { delivered = delivered }
$$
